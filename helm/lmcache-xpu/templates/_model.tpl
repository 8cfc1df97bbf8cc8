{{/*
Every model as it is served: `defaults`, the model's own keys, and what follows from both.
Returns {models: {NAME: {...}}} as JSON; a mistake that the schema can't see ends here.
*/}}
{{- define "lmcache-xpu.models" -}}
{{- if not .Values.models -}}
{{- fail "\n\nmodels is empty; expected at least one model, by a name of your choice.\nFor example: --set models.qwen.settings.model=Qwen/Qwen3-8B" -}}
{{- end -}}
{{- include "lmcache-xpu.collisions" . -}}
{{- $models := dict -}}
{{- range $name, $given := .Values.models -}}
{{- $model := mergeOverwrite (deepCopy $.Values.defaults) (deepCopy (default dict $given)) -}}
{{- $_ := set $model "object" (printf "%s-%s" (include "lmcache-xpu.fullname" $) $name) -}}
{{- $_ := set $model "modelName" $name -}}
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
{{- include "lmcache-xpu.refuse" (printf "%s.settings.model is not set; expected a name on the hub, or /models/NAME with files.modelClaim." $where) -}}
{{- end -}}
{{- $gpu := ne $model.gpu.kind "none" -}}
{{- if and $gpu (eq nil $model.gpu.renderGroups) -}}
{{- include "lmcache-xpu.refuse" (printf "%s.gpu.renderGroups is not set; expected the groups that own /dev/dri/renderD* on the nodes.\nOn a node, `getent group render` shows the number: --set 'defaults.gpu.renderGroups={992}'.\nUse [] where containerd has device_ownership_from_security_context, and gpu.kind=none without GPUs." $where) -}}
{{- end -}}
{{- if eq "auto" (default "auto" $settings.device) -}}
{{- $_ := set $settings "device" (ternary "xpu" "cpu" $gpu) -}}
{{- end -}}
{{- $_ := set $settings "host" (default (include "lmcache-xpu.everywhere" .root) $settings.host) -}}
{{- $_ := set $settings "port" 8000 -}}
{{- $_ := set $model "sideCar" (eq $model.cache.kind "sideCar") -}}
{{- if $settings.disk_gib -}}
{{- /* A directory of the node is seen by all namespaces; the others belong to one pod. */ -}}
{{- $owner := ternary (printf "%s.%s" .root.Release.Namespace $model.object) $model.object (eq $model.disk.kind "hostPath") -}}
{{- $_ := set $model "diskPath" (printf "/var/cache/kv/%s" $owner) -}}
{{- if not $model.sideCar }}{{ $_ := set $settings "disk_path" $model.diskPath }}{{ end -}}
{{- if and (eq $model.disk.kind "hostPath") (not $model.disk.hostPath) -}}
{{- include "lmcache-xpu.refuse" (printf "%s.disk.hostPath is not set; expected a directory that exists on the nodes, as disk.kind is hostPath." $where) -}}
{{- end -}}
{{- end -}}
{{- $elsewhere := dict "remote_url" $settings.remote_url "server_url" (regexReplaceAll "^(ipc:|tcp://127\\.).*" (default "" $settings.server_url) "") -}}
{{- if .root.Values.valkey.enabled -}}
{{- if not $settings.remote_url -}}
{{- $address := printf "%s-valkey:6379" (include "lmcache-xpu.fullname" .root) -}}
{{- $_ := set $model "valkeyCa" .root.Values.valkey.tlsSecret -}}
{{- $_ := set $settings "remote_url" (ternary (printf "rediss://%s?ssl_ca_certs=/etc/valkey/ca.crt" $address) (printf "redis://%s" $address) (not (not $model.valkeyCa))) -}}
{{- end -}}
{{- if not $model.remotePasswordSecret -}}
{{- $_ := set $model "remotePasswordSecret" .root.Values.valkey.passwordSecret -}}
{{- end -}}
{{- end -}}
{{- include "lmcache-xpu.deriveCache" (dict "where" $where "model" $model) -}}
{{- if and .root.Values.networkPolicy.enabled (not .root.Values.networkPolicy.extraEgress) -}}
{{- range $name, $url := $elsewhere -}}
{{- if $url -}}
{{- include "lmcache-xpu.refuse" (printf "%s.settings.%s is %s, which the network policy keeps from engines; expected a rule for it:\nnetworkPolicy: {extraEgress: [{ports: [{port: PORT}], to: [{ipBlock: {cidr: ADDRESS/32}}]}]}" $where $name $url) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (eq $model.autoscaling.kind "keda") (not $model.autoscaling.prometheusUrl) (not $model.autoscaling.triggers) -}}
{{- include "lmcache-xpu.refuse" (printf "%s.autoscaling.prometheusUrl is not set; KEDA asks Prometheus, e.g. http://prometheus-operated.monitoring:9090." $where) -}}
{{- end -}}
{{- if and (ne $model.autoscaling.kind "none") (eq 0 (int $model.autoscaling.minReplicas)) -}}
{{- $wakes := false -}}
{{- range $model.autoscaling.triggers -}}
{{- if not (has .type (list "cpu" "memory")) }}{{ $wakes = eq $model.autoscaling.kind "keda" }}{{ end -}}
{{- end -}}
{{- if not $wakes -}}
{{- include "lmcache-xpu.refuse" (printf "%s.autoscaling.minReplicas is 0; expected at least 1, or KEDA with a trigger of yours in autoscaling.triggers\nthat lives without engines: a gateway's or a queue's. The chart's own are measured by the engines." $where) -}}
{{- end -}}
{{- end -}}
{{- if gt (int $model.autoscaling.minReplicas) (int $model.autoscaling.maxReplicas) -}}
{{- include "lmcache-xpu.refuse" (printf "%s.autoscaling.minReplicas is %d; expected at most maxReplicas, %d." $where (int $model.autoscaling.minReplicas) (int $model.autoscaling.maxReplicas)) -}}
{{- end -}}
{{- if and $model.httpRoute.enabled (not $model.httpRoute.parentRefs) -}}
{{- include "lmcache-xpu.refuse" (printf "%s.httpRoute.parentRefs is empty; expected the gateways that serve the route: [{name: NAME, namespace: NAMESPACE}]." $where) -}}
{{- end -}}
{{- if and $model.files.download (hasPrefix "/" $settings.model) -}}
{{- include "lmcache-xpu.refuse" (printf "%s.files.download is on, and settings.model is the directory %s; expected a name on the hub, or download off." $where $settings.model) -}}
{{- end -}}
{{- if and (eq $model.router.kind "inferencePool") (not $model.router.endpointPicker.name) -}}
{{- include "lmcache-xpu.refuse" (printf "%s.router.endpointPicker.name is not set; expected the service of the endpoint picker for this pool." $where) -}}
{{- end -}}
{{- if and $model.ingress.enabled (not $model.ingress.host) -}}
{{- include "lmcache-xpu.refuse" (printf "%s.ingress.host is not set; expected a host name of its own for each model." $where) -}}
{{- end -}}
{{- if and (eq $model.files.cache "existingClaim") (not $model.files.claimName) -}}
{{- include "lmcache-xpu.refuse" (printf "%s.files.claimName is not set; expected the claim to use, as files.cache is existingClaim." $where) -}}
{{- end -}}
{{- include "lmcache-xpu.oneClaim" (dict "where" $where "model" $model) -}}
{{- include "lmcache-xpu.clusterRules" (dict "root" .root "where" $where "model" $model) -}}
{{- $_ := set $model "eventPorts" list -}}
{{- with $settings.kv_events -}}
{{- /* vLLM publishes where the address has a wildcard; elsewhere it calls, and needs no port. */ -}}
{{- if regexMatch "^tcp://.*\\*:[1-9][0-9]*$" . -}}
{{- $port := splitList ":" . | last | int -}}
{{- $_ := set $model "eventPorts" (list $port (add $port (default 1 $settings.data_parallel) -1)) -}}
{{- end -}}
{{- end -}}
{{- $devices := mul (default 1 $settings.tensor_parallel) (default 1 $settings.pipeline_parallel) (default 1 $settings.data_parallel) | int -}}
{{- $_ := set $model "devices" $devices -}}
{{- $several := and $gpu (not .root.Values.clusterUsers) (gt (mul (default 1 $settings.tensor_parallel) (default 1 $settings.pipeline_parallel)) 1) -}}
{{- $_ := set $model "sysPtrace" (ternary $several $model.gpu.sysPtrace (kindIs "invalid" $model.gpu.sysPtrace)) -}}
{{- $_ := set $model "gpus" (int (default $devices $model.gpu.count)) -}}
{{- $_ := set $model "diskSize" (printf "%dGi" (int (ceil (mulf 1.1 $devices (default 0 $settings.disk_gib))))) -}}
{{- with $model.files.revision -}}
{{- $_ := set $settings "extra_args" (concat (default list $settings.extra_args) (list "--revision" .)) -}}
{{- end -}}
{{- $_ := set $model "servedName" (default $settings.model $settings.served_model_name) -}}
{{- $_ := set $model "workload" (ternary "StatefulSet" "Deployment" (and (not (not $settings.disk_gib)) (eq $model.disk.kind "volumeClaim"))) -}}
{{- $_ := set $model "lentGib" (ternary (mulf $devices (default 5 $settings.cpu_gib)) 0 (or $model.sideCar $model.ownServer)) -}}
{{- $_ := set $model "resources" (mergeOverwrite (include "lmcache-xpu.resources" $model | fromYaml) (deepCopy $model.resources)) -}}
{{- end -}}

{{/* One claim for the files of several pods, which another node can't mount */}}
{{- define "lmcache-xpu.oneClaim" -}}
{{- $model := .model -}}
{{- $pods := int (ternary $model.replicas $model.autoscaling.maxReplicas (eq $model.autoscaling.kind "none")) -}}
{{- $oneNode := and (eq $model.files.accessMode "ReadWriteOnce") (hasKey $model.nodeSelector "kubernetes.io/hostname") -}}
{{- if and (eq $model.files.cache "volumeClaim") (gt $pods 1) (ne $model.files.accessMode "ReadWriteMany") (not $oneNode) -}}
{{- include "lmcache-xpu.refuse" (printf "%s has up to %d pods and files.cache is volumeClaim with files.accessMode=%s; expected ReadWriteMany, or\nfiles.cache=emptyDir: on another node a pod would wait for the claim for ever. On one node alone, name it:\nnodeSelector: {kubernetes.io/hostname: NODE}." .where $pods $model.files.accessMode) -}}
{{- end -}}
{{- end -}}

{{/* What a cluster that gives users, or has IPv6 alone, can't do */}}
{{- define "lmcache-xpu.clusterRules" -}}
{{- $model := .model -}}
{{- if and .root.Values.clusterUsers $model.settings.disk_gib (eq $model.disk.kind "hostPath") -}}
{{- include "lmcache-xpu.refuse" (printf "%s.disk.kind is hostPath with clusterUsers; expected volumeClaim or emptyDir: a directory of the node\nbelongs to no user that the cluster gives, and OpenShift's restricted SCC lets no pod mount it." .where) -}}
{{- end -}}
{{- if and .root.Values.ipv6 $model.sideCar -}}
{{- include "lmcache-xpu.refuse" (printf "%s.cache.kind is sideCar with ipv6; expected inProcess: the server's health page listens on IPv4 alone." .where) -}}
{{- end -}}
{{- if and .root.Values.ipv6 $model.settings.kv_events -}}
{{- include "lmcache-xpu.refuse" (printf "%s.settings.kv_events is set with ipv6; expected it unset: vLLM publishes on IPv4 alone." .where) -}}
{{- end -}}
{{- end -}}

{{/* Where LMCache runs; changes the model's settings */}}
{{- define "lmcache-xpu.deriveCache" -}}
{{- $model := .model -}}
{{- $settings := $model.settings -}}
{{- /* As Settings.is_server: `serve` starts a server in the engine's container. */ -}}
{{- $ranks := mul (default 1 $settings.tensor_parallel) (default 1 $settings.pipeline_parallel) | int -}}
{{- $cache := default "auto" $settings.cache -}}
{{- $isServer := or (eq $cache "server") (and (eq $cache "auto") (gt $ranks 1) (not $settings.layerwise)) -}}
{{- $_ := set $model "ownServer" (and $isServer (ne $settings.offload false) (not $settings.server_url) (not $model.sideCar)) -}}
{{- $lacks := dict "layerwise" false "kv_events" "" "tier_dtype" "auto" -}}
{{- if and (not $model.sideCar) (eq $cache "in-process") (gt $ranks 1) (not $settings.layerwise) -}}
{{- include "lmcache-xpu.refuse" (printf "%s.settings.cache is in-process with an engine of %d devices; expected server, or none: its workers share a server." .where $ranks) -}}
{{- end -}}
{{- if and $isServer (not $model.sideCar) -}}
{{- range $name, $value := $lacks -}}
{{- with get $settings $name -}}
{{- if ne (toString .) (toString $value) -}}
{{- include "lmcache-xpu.refuse" (printf "%s.settings.%s is %v, and LMCache runs as a server (settings.cache, or several devices per engine); expected it unset:\nLMCache's server has no such choice." $.where $name .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $model.sideCar -}}
{{- if or $settings.server_url (eq "in-process" (default "server" $settings.cache)) -}}
{{- include "lmcache-xpu.refuse" (printf "%s.cache.kind is sideCar with settings.cache or settings.server_url; expected neither: the chart sets both." .where) -}}
{{- end -}}
{{- if eq $settings.offload false -}}
{{- include "lmcache-xpu.refuse" (printf "%s.cache.kind is sideCar with settings.offload=false; expected inProcess: nothing would use the server." .where) -}}
{{- end -}}
{{- /* What the connector to the server lacks: Settings refuses it as well, once the pod runs. */ -}}
{{- range $name, $value := merge (dict "remote_url" "") $lacks -}}
{{- $set := get $settings $name -}}
{{- if and (hasKey $settings $name) (not (kindIs "invalid" $set)) (ne (toString $set) (toString $value)) -}}
{{- include "lmcache-xpu.refuse" (printf "%s.cache.kind is sideCar with %s=%v; expected it unset: LMCache's server has no such choice.\nFor a shared Valkey (valkey.enabled), layerwise mode or KV events use inProcess." $.where $name $set) -}}
{{- end -}}
{{- end -}}
{{- $_ := set $settings "cache" "server" -}}
{{- $_ := set $settings "server_url" "ipc:///dev/shm/lmcache-xpu/server.sock" -}}
{{- end -}}
{{- end -}}

{{/*
Resources of the side-car. Its memory is the pages of /dev/shm that it lends; the limit has them
twice, as after a crash the engine holds the old ones until the server answers again.
*/}}
{{- define "lmcache-xpu.serverResources" -}}
requests:
  cpu: {{ .cache.cpus | toJson | trimAll "\"" | quote }}
  memory: {{ printf "%dGi" (int (ceil (addf .cache.hostGib .lentGib))) }}
limits:
  memory: {{ printf "%dGi" (int (ceil (addf .cache.hostGib (mulf 2 .lentGib)))) }}
{{- end -}}

{{/*
Resources of a model's pod. The memory counts the CPU tiers also where they are pinned memory of a
GPU, which is not charged to the container: so the scheduler keeps them free on the node. With a
server in the engine's container they are pages of /dev/shm, and the limit has them twice: a server
that starts again has new ones while the engine still holds the old.
*/}}
{{- define "lmcache-xpu.resources" -}}
{{- $settings := .settings -}}
{{- $gib := addf .hostGib .shmGib -}}
{{- if and (ne $settings.offload false) (not .sideCar) -}}
{{- $gib = addf $gib (mulf .devices (default 5 $settings.cpu_gib)) -}}
{{- end -}}
{{- if eq $settings.device "cpu" -}}
{{- $gib = addf $gib (mulf .devices (default 4 $settings.kv_cache_gib)) -}}
{{- end -}}
requests:
  cpu: {{ .cpus | toJson | trimAll "\"" | quote }}
  memory: {{ printf "%dGi" (int (ceil $gib)) }}
  ephemeral-storage: {{ include "lmcache-xpu.ephemeralGib" . }}Gi
limits:
  memory: {{ printf "%dGi" (int (ceil (addf $gib (ternary .lentGib 0 .ownServer)))) }}
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

{{/* Not empty when some model has LMCache's server beside its engine */}}
{{- define "lmcache-xpu.sideCars" -}}
{{- range (include "lmcache-xpu.models" . | fromJson).models -}}
{{- if .sideCar }}yes{{ end -}}
{{- end -}}
{{- end -}}

{{/* What a model's ResourceClaimTemplate asks for */}}
{{- define "lmcache-xpu.claim" -}}
spec:
  devices:
    requests:
      - name: gpu
        exactly:
          deviceClassName: {{ .gpu.deviceClassName }}
          allocationMode: ExactCount
          count: {{ .gpus }}
          {{- with .gpu.selectors }}
          selectors:
            {{- range . }}
            - cel:
                expression: {{ . | quote }}
            {{- end }}
          {{- end }}
{{- end -}}

{{/* Its name, which has a checksum of its contents */}}
{{- define "lmcache-xpu.claimTemplate" -}}
{{- printf "%s-gpu-%s" .object (include "lmcache-xpu.claim" . | sha256sum | trunc 8) -}}
{{- end -}}

{{/*
Seconds that one pod may take from its making to readiness: what the old one takes to end, the
download, the start, and what scheduling and pulling images add.
*/}}
{{- define "lmcache-xpu.deadlineS" -}}
{{- add (include "lmcache-xpu.graceS" . | int) (ternary .files.downloadS 0 .files.download) .startup.limitS 600 -}}
{{- end -}}

{{/* Seconds between the wish to end a pod and its end */}}
{{- define "lmcache-xpu.graceS" -}}
{{- add .stop.preStopS (default 0 .settings.drain_s) .stop.marginS -}}
{{- end -}}

{{/*
Nothing here asks the cluster: `helm template`, Argo CD and Flux make the same objects as an upgrade.
Where an autoscaler decides, the number of pods is not the manifest's.
*/}}
{{- define "lmcache-xpu.replicas" -}}
{{- if eq .autoscaling.kind "none" -}}
replicas: {{ .replicas }}
{{- end -}}
{{- end -}}

{{/* The part that the clients' service selects */}}
{{- define "lmcache-xpu.front" -}}
{{- ternary "router" "engine" (and (eq .router.kind "vllmRouter") .router.front) -}}
{{- end -}}

{{/* Models whose objects would have the names of other objects of the release */}}
{{- define "lmcache-xpu.collisions" -}}
{{- $names := keys .Values.models | sortAlpha -}}
{{- $endings := list "router" "engine" "hub" "chat" "gpu" -}}
{{- range $name := $names -}}
{{- if has $name (list "valkey" "dashboard" "router") -}}
{{- include "lmcache-xpu.refuse" (printf "\n\nmodels.%s has the name of another part of the chart; expected a name that is none of:\nvalkey, dashboard, router." $name) -}}
{{- end -}}
{{- range $ending := $endings -}}
{{- if hasSuffix (printf "-%s" $ending) $name -}}
{{- if has (trimSuffix (printf "-%s" $ending) $name) $names -}}
{{- include "lmcache-xpu.refuse" (printf "\n\nmodels.%s has the name of a part of models.%s; expected another name." $name (trimSuffix (printf "-%s" $ending) $name)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* GiB of the node's own disk that the pod may fill: its emptyDirs that are not memory */}}
{{- define "lmcache-xpu.ephemeralGib" -}}
{{- $gib := addf .scratchGib (ternary .files.cacheGib 0 (eq .files.cache "emptyDir")) -}}
{{- if and .settings.disk_gib (eq .disk.kind "emptyDir") -}}
{{- $gib = addf $gib (mulf 1.1 .devices .settings.disk_gib) -}}
{{- end -}}
{{- int (ceil $gib) -}}
{{- end -}}
