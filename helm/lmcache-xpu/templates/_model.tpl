{{/*
Every model as it is served: `defaults`, the model's own keys, and what follows from both.
Returns {models: {NAME: {...}}} as JSON; a mistake that the schema can't see ends here.
*/}}
{{- define "lmcache-xpu.models" -}}
{{- if not .Values.models -}}
{{- fail "\n\nmodels is empty; expected at least one model, by a name of your choice.\nFor example: --set models.qwen.settings.model=Qwen/Qwen3-8B" -}}
{{- end -}}
{{- $models := dict -}}
{{- range $name, $given := .Values.models -}}
{{- $model := mergeOverwrite (deepCopy $.Values.defaults) (deepCopy (default dict $given)) -}}
{{- $_ := set $model "object" (printf "%s-%s" (include "lmcache-xpu.fullname" $) $name) -}}
{{- $_ := include "lmcache-xpu.derive" (dict "root" $ "name" $name "model" $model) -}}
{{- $_ := set $models $name $model -}}
{{- end -}}
{{- dict "models" $models | toJson -}}
{{- end -}}

{{/* Fill in what follows from a model's values; changes the model */}}
{{- define "lmcache-xpu.derive" -}}
{{- $model := .model -}}
{{- $settings := $model.settings -}}
{{- $where := printf "\n\nmodels.%s" .name -}}
{{- if not $settings.model -}}
{{- fail (printf "%s.settings.model is not set; expected a name on the hub, or /models/NAME with files.modelClaim." $where) -}}
{{- end -}}
{{- $gpu := ne $model.gpu.kind "none" -}}
{{- if and $gpu (eq nil $model.gpu.renderGroups) -}}
{{- fail (printf "%s.gpu.renderGroups is not set; expected the groups that own /dev/dri/renderD* on the nodes.\nOn a node, `getent group render` shows the number: --set 'defaults.gpu.renderGroups={992}'.\nUse [] where containerd has device_ownership_from_security_context, and gpu.kind=none without GPUs." $where) -}}
{{- end -}}
{{- if eq "auto" (default "auto" $settings.device) -}}
{{- $_ := set $settings "device" (ternary "xpu" "cpu" $gpu) -}}
{{- end -}}
{{- $_ := set $settings "host" (default "0.0.0.0" $settings.host) -}}
{{- $_ := set $settings "port" 8000 -}}
{{- if $settings.disk_gib -}}
{{- $_ := set $settings "disk_path" (printf "/var/cache/kv/%s" $model.object) -}}
{{- if and (eq $model.disk.kind "hostPath") (not $model.disk.hostPath) -}}
{{- fail (printf "%s.disk.hostPath is not set; expected a directory that exists on the nodes, as disk.kind is hostPath." $where) -}}
{{- end -}}
{{- end -}}
{{- if .root.Values.valkey.enabled -}}
{{- $_ := set $settings "remote_url" (default (printf "redis://%s-valkey:6379" (include "lmcache-xpu.fullname" .root)) $settings.remote_url) -}}
{{- if not $model.remotePasswordSecret -}}
{{- $_ := set $model "remotePasswordSecret" .root.Values.valkey.passwordSecret -}}
{{- end -}}
{{- end -}}
{{- if and (eq $model.autoscaling.kind "keda") (not $model.autoscaling.prometheusUrl) -}}
{{- fail (printf "%s.autoscaling.prometheusUrl is not set; KEDA asks Prometheus, e.g. http://prometheus-operated.monitoring:9090." $where) -}}
{{- end -}}
{{- if and (eq $model.router.kind "inferencePool") (not $model.router.endpointPicker.name) -}}
{{- fail (printf "%s.router.endpointPicker.name is not set; expected the service of the endpoint picker for this pool." $where) -}}
{{- end -}}
{{- if and $model.ingress.enabled (not $model.ingress.host) -}}
{{- fail (printf "%s.ingress.host is not set; expected a host name of its own for each model." $where) -}}
{{- end -}}
{{- if and (eq $model.files.cache "existingClaim") (not $model.files.claimName) -}}
{{- fail (printf "%s.files.claimName is not set; expected the claim to use, as files.cache is existingClaim." $where) -}}
{{- end -}}
{{- $devices := mul (default 1 $settings.tensor_parallel) (default 1 $settings.data_parallel) | int -}}
{{- $_ := set $model "devices" $devices -}}
{{- $_ := set $model "gpus" (int (default $devices $model.gpu.count)) -}}
{{- $_ := set $model "diskSize" (printf "%dGi" (int (ceil (mulf 1.1 $devices (default 0 $settings.disk_gib))))) -}}
{{- $_ := set $model "servedName" (default $settings.model $settings.served_model_name) -}}
{{- $_ := set $model "workload" (ternary "StatefulSet" "Deployment" (and (not (not $settings.disk_gib)) (eq $model.disk.kind "volumeClaim"))) -}}
{{- $_ := set $model "resources" (mergeOverwrite (include "lmcache-xpu.resources" $model | fromYaml) (deepCopy $model.resources)) -}}
{{- end -}}

{{/*
Resources of a model's pod. The memory counts the CPU tiers also where they are pinned memory of a
GPU, which is not charged to the container: so the scheduler keeps them free on the node.
*/}}
{{- define "lmcache-xpu.resources" -}}
{{- $settings := .settings -}}
{{- $gib := addf .hostGib .shmGib -}}
{{- if ne $settings.offload false -}}
{{- $gib = addf $gib (mulf .devices (default 5 $settings.cpu_gib)) -}}
{{- end -}}
{{- if eq $settings.device "cpu" -}}
{{- $gib = addf $gib (mulf .devices (default 4 $settings.kv_cache_gib)) -}}
{{- end -}}
requests:
  cpu: {{ .cpus | toJson | trimAll "\"" | quote }}
  memory: {{ printf "%dGi" (int (ceil $gib)) }}
limits:
  memory: {{ printf "%dGi" (int (ceil $gib)) }}
  {{- if eq .gpu.kind "devicePlugin" }}
  {{ .gpu.resource }}: {{ .gpus | quote }}
  {{- end }}
{{- if eq .gpu.kind "dra" }}
claims:
  - name: gpu
{{- end }}
{{- end -}}

{{/* Not empty when some model has a vllm-router */}}
{{- define "lmcache-xpu.routed" -}}
{{- range (include "lmcache-xpu.models" . | fromJson).models -}}
{{- if eq .router.kind "vllmRouter" }}yes{{ end -}}
{{- end -}}
{{- end -}}
