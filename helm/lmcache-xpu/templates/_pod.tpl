{{/* Pod template of a model's engine: (dict "root" $ "name" NAME "model" MODEL) */}}
{{- define "lmcache-xpu.pod" -}}
{{- $root := .root -}}
{{- $model := .model -}}
{{- $part := dict "root" $root "name" .name "component" "engine" -}}
{{- $image := dict "root" $root "own" $model.engineImage "name" $model.settings.device -}}
metadata:
  labels:
    {{- include "lmcache-xpu.part" $part | nindent 4 }}
    {{- with (merge (dict) $model.podLabels $root.Values.commonLabels) }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $model.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  # A service named lmcache-xpu would become the variable LMCACHE_XPU_PORT=tcp://...
  enableServiceLinks: false
  serviceAccountName: {{ include "lmcache-xpu.serviceAccountName" $root }}
  automountServiceAccountToken: false
  {{- with $root.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $model.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $model.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $model.schedulerName }}
  schedulerName: {{ . }}
  {{- end }}
  terminationGracePeriodSeconds: {{ include "lmcache-xpu.graceS" $model }}
  securityContext:
    {{- $security := include "lmcache-xpu.podSecurity" (dict "root" $root "user" $model.user) | fromYaml }}
    {{- if $model.gpu.renderGroups }}
    {{- $_ := set $security "supplementalGroups" $model.gpu.renderGroups }}
    {{- end }}
    {{- mergeOverwrite $security (deepCopy $model.podSecurityContext) | toYaml | nindent 4 }}
  {{- include "lmcache-xpu.placement" . | nindent 2 }}
  {{- if eq $model.gpu.kind "dra" }}
  resourceClaims:
    - name: gpu
      resourceClaimTemplateName: {{ include "lmcache-xpu.claimTemplate" $model }}
  {{- end }}
  {{- if or $model.files.download $model.initContainers $model.sideCar }}
  initContainers:
    {{- if $model.files.download }}
    - name: download
      {{- include "lmcache-xpu.image" $image | nindent 6 }}
      command:
        - hf
        - download
        - {{ $model.settings.model | quote }}
        {{- with $model.files.revision }}
        - --revision
        - {{ . | quote }}
        {{- end }}
        {{- range $model.files.include }}
        - --include
        - {{ . | quote }}
        {{- end }}
        {{- range $model.files.exclude }}
        - --exclude
        - {{ . | quote }}
        {{- end }}
      env:
        {{- include "lmcache-xpu.environment" $model | nindent 8 }}
        {{- with $model.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $model.extraEnvFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      resources:
        # Equal, so that a pod whose engine has a limit of cores too is Guaranteed.
        requests: {cpu: "1", memory: 4Gi}
        limits: {cpu: "1", memory: 4Gi}
      securityContext:
        {{- include "lmcache-xpu.containerSecurity" . | nindent 8 }}
      volumeMounts:
        {{- include "lmcache-xpu.mounts" $model | nindent 8 }}
    {{- end }}
    {{- with $model.initContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- if $model.sideCar }}
    {{- include "lmcache-xpu.server" (dict "root" $root "model" $model "image" $image) | nindent 4 }}
    {{- end }}
  {{- end }}
  containers:
    - name: engine
      {{- include "lmcache-xpu.image" $image | nindent 6 }}
      command: [lmcache-xpu, serve]
      args: [{{ $model.settings.model | quote }}]
      # The settings are the pod's own, not a ConfigMap's: an upgrade that is refused half way, or
      # a rollout that still runs, leaves the pods that serve with what they were started with.
      env:
        {{- include "lmcache-xpu.variables" $model | nindent 8 }}
        {{- include "lmcache-xpu.environment" $model | nindent 8 }}
        {{- if $model.files.download }}
        - name: HF_HUB_OFFLINE
          value: "1"
        {{- end }}
        {{- with $model.apiKeySecret }}
        {{- include "lmcache-xpu.secretVariable" (dict "variable" "LMCACHE_XPU_API_KEY" "secret" .) | nindent 8 }}
        {{- end }}
        {{- if and $model.settings.remote_url $model.remotePasswordSecret }}
        {{- include "lmcache-xpu.secretVariable" (dict "variable" "LMCACHE_XPU_REMOTE_PASSWORD" "secret" $model.remotePasswordSecret) | nindent 8 }}
        {{- end }}
        {{- with $model.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $model.extraEnvFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        - name: http
          containerPort: 8000
        {{- with $model.eventPorts }}
        - name: kv-events
          containerPort: {{ first . }}
        {{- end }}
      {{- include "lmcache-xpu.probes" $model | trim | nindent 6 }}
      {{- if $model.stop.preStopS }}
      lifecycle:
        preStop:
          sleep:
            seconds: {{ $model.stop.preStopS }}
      {{- end }}
      resources:
        {{- toYaml $model.resources | nindent 8 }}
      securityContext:
        {{- $security := include "lmcache-xpu.containerSecurity" . | fromYaml }}
        {{- if $model.sysPtrace }}
        {{- $_ := set $security.capabilities "add" (list "SYS_PTRACE") }}
        {{- end }}
        {{- mergeOverwrite $security (deepCopy $model.containerSecurityContext) | toYaml | nindent 8 }}
      volumeMounts:
        {{- include "lmcache-xpu.mounts" $model | nindent 8 }}
        {{- if and $model.settings.disk_gib (not $model.sideCar) }}
        - name: kv
          mountPath: /var/cache/kv
        {{- end }}
        {{- with $model.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    {{- include "lmcache-xpu.volumes" $model | nindent 4 }}
{{- end -}}

{{/*
Probes of the engine's container; the model's own win. Long prompts may hold the server up for some
seconds: only a minute of silence ends it.
*/}}
{{- define "lmcache-xpu.probes" -}}
{{- $health := dict "path" "/health" "port" "http" -}}
{{- $start := div (add .startup.limitS 9) 10 -}}
{{- $probes := dict
  "startup" (dict "periodSeconds" 10 "timeoutSeconds" 5 "failureThreshold" $start)
  "readiness" (dict "periodSeconds" 5 "timeoutSeconds" 5 "failureThreshold" 2)
  "liveness" (dict "periodSeconds" 15 "timeoutSeconds" 10 "failureThreshold" 4)
-}}
{{- range $name, $probe := $probes }}
{{- $own := get $.probes $name | default dict }}
{{- /* A probe has one handler. */}}
{{- if not (or $own.exec $own.tcpSocket $own.grpc) }}{{ $_ := set $probe "httpGet" $health }}{{ end }}
{{ $name }}Probe:
  {{- mergeOverwrite $probe (deepCopy $own) | toYaml | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Variables that are not settings: caches go where the pod may write, and the hub's token */}}
{{- define "lmcache-xpu.environment" -}}
- name: HOME
  value: /cache
- name: USER
  value: engine
- name: HF_HOME
  value: /cache/huggingface
{{- with .files.tokenSecret }}
{{ include "lmcache-xpu.secretVariable" (dict "variable" "HF_TOKEN" "secret" .) }}
{{- end }}
{{- end -}}

{{- define "lmcache-xpu.mounts" -}}
- name: tmp
  mountPath: /tmp
- name: shm
  mountPath: /dev/shm
- name: {{ ternary "cache" "hub" (eq .files.cache "emptyDir") }}
  mountPath: /cache
  {{- if ne .files.cache "emptyDir" }}
  # Compiled kernels of vLLM, Triton and the driver, which the next pod finds again.
  subPath: compiled
  {{- end }}
- name: hub
  mountPath: /cache/huggingface
{{- if .files.modelClaim }}
- name: models
  mountPath: /models
  readOnly: true
{{- end }}
{{- if .valkeyCa }}
- name: valkey-ca
  mountPath: /etc/valkey
  readOnly: true
{{- end }}
{{- end -}}

{{- define "lmcache-xpu.volumes" -}}
- name: tmp
  emptyDir:
    sizeLimit: {{ printf "%dGi" (int (ceil .scratchGib)) }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ printf "%dGi" (int (ceil (addf .shmGib (mulf 2 .lentGib)))) }}
{{- if eq .files.cache "emptyDir" }}
- name: cache
  emptyDir:
    sizeLimit: {{ printf "%dGi" (int (ceil .scratchGib)) }}
{{- end }}
- name: hub
  {{- if eq .files.cache "emptyDir" }}
  emptyDir:
    sizeLimit: {{ printf "%dGi" (int (ceil .files.cacheGib)) }}
  {{- else }}
  persistentVolumeClaim:
    claimName: {{ ternary .files.claimName (printf "%s-hub" .object) (eq .files.cache "existingClaim") }}
  {{- end }}
{{- with .valkeyCa }}
- name: valkey-ca
  secret:
    secretName: {{ . }}
    # Not the key of its certificate.
    items: [{key: ca.crt, path: ca.crt}]
{{- end }}
{{- with .files.modelClaim }}
- name: models
  persistentVolumeClaim:
    claimName: {{ . }}
    readOnly: true
{{- end }}
{{- if and .settings.disk_gib (eq .disk.kind "emptyDir") }}
- name: kv
  emptyDir:
    sizeLimit: {{ .diskSize }}
{{- end }}
{{- if and .settings.disk_gib (eq .disk.kind "hostPath") }}
- name: kv
  hostPath:
    path: {{ .disk.hostPath }}
    # Made by kubelet it would belong to root.
    type: Directory
{{- end }}
{{- with .extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The settings as variables; arguments are quoted as for a shell */}}
{{- define "lmcache-xpu.variables" -}}
{{- $variables := list -}}
{{- $settings := omit .settings "model" -}}
{{- if .sideCar }}{{ $settings = omit $settings "cpu_gib" "disk_gib" }}{{ end -}}
{{- range $name, $value := $settings -}}
{{- if not (kindIs "invalid" $value) -}}
{{- $text := ternary $value (toJson $value) (kindIs "string" $value) -}}
{{- if kindIs "slice" $value -}}
{{- $words := list -}}
{{- range $value }}{{ $words = append $words (printf "'%s'" (toString . | replace "'" "'\"'\"'")) }}{{ end -}}
{{- $text = join " " $words -}}
{{- end -}}
{{- $variables = append $variables (dict "name" (printf "LMCACHE_XPU_%s" (upper $name)) "value" $text) -}}
{{- end -}}
{{- end -}}
{{- toYaml $variables -}}
{{- end -}}
