{{/*
Refuse values with this message. `helm lint` lets `fail` pass; there the second line is the error,
which ends with the message.
*/}}
{{- define "lmcache-xpu.refuse" -}}
{{- fail . -}}
{{- semverCompare (printf "\n\n%s" (trim .)) "1.0.0" -}}
{{- end -}}

{{- define "lmcache-xpu.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "lmcache-xpu.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 30 | trimSuffix "-" -}}
{{- else if contains (include "lmcache-xpu.name" .) .Release.Name -}}
{{- .Release.Name | trunc 30 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "lmcache-xpu.name" .) | trunc 30 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "lmcache-xpu.selectorLabels" -}}
app.kubernetes.io/name: {{ include "lmcache-xpu.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "lmcache-xpu.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "lmcache-xpu.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "lmcache-xpu.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "lmcache-xpu.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Labels that select one part of one model: (dict "root" $ "name" NAME "component" COMPONENT) */}}
{{- define "lmcache-xpu.part" -}}
{{ include "lmcache-xpu.selectorLabels" .root }}
app.kubernetes.io/component: {{ .component }}
lmcache-xpu/model: {{ .name }}
{{- end -}}

{{/* The same with all labels, for metadata */}}
{{- define "lmcache-xpu.partLabels" -}}
{{ include "lmcache-xpu.labels" .root }}
app.kubernetes.io/component: {{ .component }}
lmcache-xpu/model: {{ .name }}
{{- end -}}

{{/* Security context of every container */}}
{{- define "lmcache-xpu.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Security context of every pod: (dict "root" $ "user" ID) */}}
{{- define "lmcache-xpu.podSecurity" -}}
runAsNonRoot: true
{{- if not .root.Values.clusterUsers }}
runAsUser: {{ int .user }}
runAsGroup: {{ int .user }}
fsGroup: {{ int .user }}
{{- end }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* Every address of the pod. :: takes IPv4 as well, but is refused where the node has no IPv6 */}}
{{- define "lmcache-xpu.everywhere" -}}
{{- ternary "::" "0.0.0.0" .Values.ipv6 -}}
{{- end -}}

{{/* An environment variable from a secret: (dict "variable" NAME "secret" {name, key}) */}}
{{- define "lmcache-xpu.secretVariable" -}}
- name: {{ .variable }}
  valueFrom:
    secretKeyRef:
      name: {{ .secret.name }}
      key: {{ .secret.key }}
{{- end -}}

{{/* Image of a container: (dict "root" $ "own" IMAGE "name" NAME), where an empty IMAGE is the project's NAME */}}
{{- define "lmcache-xpu.image" -}}
{{- $image := .root.Values.image -}}
{{- if not (or .own $image.registry) -}}
{{- include "lmcache-xpu.refuse" "image.registry is not set; expected where you pushed the project's images, e.g. registry.example.com/lmcache-xpu:\nno public registry has them (docs/guides/kubernetes.md)." -}}
{{- end -}}
{{- $project := printf "%s/%s:%s" $image.registry .name (default .root.Chart.AppVersion $image.tag) -}}
{{- with get $image.digests (default "" .name) -}}
{{- $project = printf "%s@%s" $project . -}}
{{- end -}}
image: {{ default $project .own | quote }}
imagePullPolicy: {{ $image.pullPolicy }}
{{- end -}}

{{/* The `pod` values of a part that is no engine, over `otherPods`: (dict "root" $ "pod" VALUES) */}}
{{- define "lmcache-xpu.otherPod" -}}
{{- mergeOverwrite (deepCopy .root.Values.otherPods) (deepCopy .pod) | toJson -}}
{{- end -}}

{{/* Labels and annotations of such a pod: (dict "root" $ "labels" SELECTOR-LABELS "pod" VALUES) */}}
{{- define "lmcache-xpu.podMetadata" -}}
{{- $pod := include "lmcache-xpu.otherPod" . | fromJson -}}
labels:
  {{- .labels | nindent 2 }}
  {{- with $pod.labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with $pod.annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Where such a pod may run: (dict "root" $ "pod" VALUES); nothing when all are empty */}}
{{- define "lmcache-xpu.podPlacement" -}}
{{- range $key, $value := omit (include "lmcache-xpu.otherPod" . | fromJson) "labels" "annotations" }}
{{- with $value }}
{{ $key }}:
  {{- if kindIs "string" . }} {{ . | quote }}{{ else }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* What every pod may reach: DNS, wherever it is. 5353 is the port of OpenShift's pods */}}
{{- define "lmcache-xpu.dns" -}}
- ports:
    {{- range $port := list 53 5353 }}
    {{- range list "UDP" "TCP" }}
    - {port: {{ $port }}, protocol: {{ . }}}
    {{- end }}
    {{- end }}
{{- end -}}

{{/* The rule by which a pod reaches a model's engines: (dict "root" $ "name" NAME) */}}
{{- define "lmcache-xpu.toEngines" -}}
- ports: [{port: 8000, protocol: TCP}]
  to:
    - podSelector:
        matchLabels:
          {{- include "lmcache-xpu.part" (merge (dict "component" "engine") .) | nindent 10 }}
{{- end -}}
