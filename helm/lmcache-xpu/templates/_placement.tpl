{{/* Where the pod may run */}}
{{- define "lmcache-xpu.placement" -}}
{{- $model := .model -}}
{{- $labels := include "lmcache-xpu.part" (dict "root" .root "name" .name "component" "engine") | fromYaml -}}
{{- $affinity := dict -}}
{{- $terms := list -}}
{{- $gpuLabel := dict "key" "intel.feature.node.kubernetes.io/gpu" "operator" "In" "values" (list "true") -}}
{{- $wanted := and $model.gpu.nodeAffinity (eq $model.gpu.kind "devicePlugin") -}}
{{- if ne $model.gpu.kind "none" -}}
{{- range $device := $model.gpu.deviceIds -}}
{{- /* The label has the PCI class as well: 0300 of Arc, 0380 of the Data Center GPUs Flex and Max. */ -}}
{{- range $class := list "0300" "0380" -}}
{{- $id := dict "key" (printf "gpu.intel.com/device-id.%s-%s.present" $class $device) "operator" "In" "values" (list "true") -}}
{{- $terms = append $terms (dict "matchExpressions" (ternary (list $gpuLabel $id) (list $id) $wanted)) -}}
{{- end -}}
{{- end -}}
{{- if and $wanted (not $terms) -}}
{{- $terms = list (dict "matchExpressions" (list $gpuLabel)) -}}
{{- end -}}
{{- end -}}
{{- if $terms -}}
{{- $_ := set $affinity "nodeAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (dict "nodeSelectorTerms" $terms)) -}}
{{- end -}}
{{- if and $model.settings.disk_gib (eq $model.disk.kind "hostPath") -}}
{{- /* One process owns the tier's directory. */ -}}
{{- $apart := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchLabels" $labels) -}}
{{- $_ := set $affinity "podAntiAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (list $apart)) -}}
{{- end -}}
{{- with (default $affinity $model.affinity) }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $model.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $model.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if $model.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml $model.topologySpreadConstraints | nindent 2 }}
{{- else if $model.spread }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- toYaml $labels | nindent 8 }}
{{- end }}
{{- end -}}
