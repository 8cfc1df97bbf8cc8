{{/*
LMCache's server as a side-car of Kubernetes: an init container that goes on (1.29). It starts before
the engine and ends after it. Both see the pod's /dev/shm, and nobody else does. Ports are numbers
wherever they are used: not every release finds those of init containers by name.
*/}}
{{- define "lmcache-xpu.server" -}}
{{- $model := .model -}}
- name: server
  {{- include "lmcache-xpu.image" .image | nindent 2 }}
  restartPolicy: Always
  command: [cache-server]
  env:
    - name: CACHE_GIB
      value: {{ $model.lentGib | toJson | quote }}
    {{- if $model.settings.disk_gib }}
    - name: CACHE_DISK_GIB
      value: {{ mulf $model.devices $model.settings.disk_gib | toJson | quote }}
    - name: CACHE_DISK_PATH
      value: {{ $model.diskPath }}
    {{- end }}
    {{- with $model.settings.chunk_tokens }}
    - name: CACHE_CHUNK_TOKENS
      value: {{ toJson . | quote }}
    {{- end }}
    # For probes and Prometheus; engines reach it by a socket in the pod's /dev/shm.
    - name: CACHE_PAGES
      value: 0.0.0.0:5556
    - name: HOME
      value: /tmp
  ports:
    - name: server-metrics
      containerPort: 5556
  startupProbe:
    httpGet: {path: /healthcheck, port: 5556}
    periodSeconds: 2
    timeoutSeconds: 5
    failureThreshold: 150
  livenessProbe:
    httpGet: {path: /healthcheck, port: 5556}
    periodSeconds: 15
    timeoutSeconds: 10
    failureThreshold: 4
  resources:
    {{- mergeOverwrite (include "lmcache-xpu.serverResources" $model | fromYaml) (deepCopy $model.cache.resources) | toYaml | nindent 4 }}
  securityContext:
    {{- include "lmcache-xpu.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - name: shm
      mountPath: /dev/shm
    - name: tmp
      mountPath: /tmp
      subPath: server
    {{- if $model.settings.disk_gib }}
    - name: kv
      mountPath: /var/cache/kv
    {{- end }}
{{- end -}}
