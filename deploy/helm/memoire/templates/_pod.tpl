{{/*
What Pods and containers have in common. Pieces are made as YAML and put together as maps, so that what a user says of a
Pod can win over what the chart says.
*/}}

{{/* The template of a Pod. Takes (dict "root" $ "component" "server" "values" <its values> "spec" <containers, volumes, ...>
"group" <whether volumes need fsGroup> "client" <whether it connects as a client> "annotations" <dict> "port" <name of the port that is scraped>). */}}
{{- define "memoire.pod" -}}
{{- $root := .root -}}
{{- $values := .values -}}
metadata:
  labels:
    {{- include "memoire.selector" . | nindent 4 }}
    {{- if .client }}
    memoire.io/client: "true"
    {{- end }}
    {{- with merge (dict) $values.podLabels $root.Values.commonLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- $annotations := merge (dict) $values.podAnnotations (default dict .annotations) }}
  {{- if and $root.Values.monitoring.annotations .port }}
  {{- $annotations = merge $annotations (dict "prometheus.io/scrape" "true" "prometheus.io/path" "/metrics" "prometheus.io/port" (toString .port)) }}
  {{- end }}
  {{- with $annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- mergeOverwrite (fromYaml (include "memoire.podSpec" .)) .spec $values.podSpecExtra | toYaml | nindent 2 }}
{{- end }}

{{- define "memoire.podSpec" -}}
{{- $root := .root -}}
{{- $values := .values -}}
serviceAccountName: {{ include "memoire.serviceAccountName" $root }}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ $values.terminationGracePeriodSeconds }}
{{- with include "memoire.pullSecrets" $root | fromYamlArray }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $context := deepCopy $root.Values.podSecurityContext }}
{{- if and .group $root.Values.fsGroup }}
{{- $context = mergeOverwrite $context (dict "fsGroup" (int64 $root.Values.fsGroup) "fsGroupChangePolicy" "OnRootMismatch") }}
{{- end }}
{{- with mergeOverwrite $context $values.podSecurityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if $values.topologySpread }}
topologySpreadConstraints:
  {{- range $key, $constraint := $values.topologySpread }}
  -
    {{- merge (dict "topologyKey" $key) $constraint (dict "labelSelector" (dict "matchLabels" (include "memoire.selector" $ | fromYaml))) | toYaml | nindent 4 }}
  {{- end }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end }}

{{- define "memoire.pullSecrets" -}}
{{- $names := .Values.image.pullSecrets -}}
{{- range (default dict .Values.global).imagePullSecrets -}}
{{- $names = append $names (kindIs "map" . | ternary (get (kindIs "map" . | ternary . dict) "name") .) -}}
{{- end -}}
{{- $result := list -}}
{{- range uniq $names }}{{ $result = append $result (dict "name" .) }}{{ end -}}
{{- toYaml $result -}}
{{- end }}

{{/* Environment variables, each name once, the last of a name: Kubernetes refuses repeated names. Takes a list. */}}
{{- define "memoire.env" -}}
{{- $names := list -}}
{{- $last := dict -}}
{{- range . -}}
{{- $names = append $names .name -}}
{{- $last = set $last .name . -}}
{{- end -}}
{{- $result := list -}}
{{- range uniq $names }}{{ $result = append $result (get $last .) }}{{ end -}}
{{- toYaml $result -}}
{{- end }}

{{/* The security context of a container. Takes (dict "root" $ "values" <its values> "base" <dict>). */}}
{{- define "memoire.containerSecurity" -}}
{{- mergeOverwrite (deepCopy .root.Values.containerSecurityContext) (default dict .base) .values.containerSecurityContext | toYaml -}}
{{- end }}

{{/* A container with one of memoire's roles. Takes (dict "root" $ "role" "server" "values" <the component's> "ports" <list>
"mounts" <list> "resources" <dict>). What it does is in the settings file. */}}
{{- define "memoire.container" -}}
{{- $root := .root -}}
{{- $isRelay := eq .role "relay" -}}
name: {{ .role }}
image: {{ include "memoire.image" (dict "root" $root "image" $root.Values.image) }}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
{{- if $root.Values.diagnosticMode }}
command: [sleep, infinity]
{{- else }}
args: [{{ .role }}]
{{- end }}
{{- $env := list (dict "name" "MEMOIRE_SETTINGS" "value" "/etc/memoire/settings/memoire.json") }}
{{- if has .role (list "server" "proxy" "relay") }}
{{- $env = append $env (dict "name" "MEMOIRE_NAME" "valueFrom" (dict "fieldRef" (dict "fieldPath" "metadata.name"))) }}
{{- end }}
{{- if and (ne .role "dashboard") (include "memoire.keys" $root) }}
{{- $env = append $env (dict "name" "MEMOIRE_KEYS" "value" "/etc/memoire/keys") }}
{{- end }}
env:
  {{- include "memoire.env" (concat $env (ternary (list) .values.extraEnv $isRelay)) | nindent 2 }}
ports:
  {{- toYaml .ports | nindent 2 }}
{{- with .resources }}
resources:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- include "memoire.containerSecurity" (dict "root" $root "values" (ternary (dict "containerSecurityContext" dict) .values $isRelay)) | nindent 2 }}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  - {name: settings, mountPath: /etc/memoire/settings, readOnly: true}
  {{- with .mounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- include "memoire.secretMounts" (dict "root" $root "keys" (ne .role "dashboard") "tokens" true) | nindent 2 }}
  {{- if not $isRelay }}
  {{- with .values.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- end }}
{{- if not $root.Values.diagnosticMode }}
{{- include "memoire.probes" . | nindent 0 }}
{{- end }}
{{- end }}

{{/* Probes on a node's pages: alive means that its threads take their turns. Five answers in a row have to be missing or bad,
and each may take 15 seconds: a node on a busy machine is slow, and a server that starts again has lost what it held.
A process that is stopped is killed after at most 85 seconds and its grace period. A node has ten minutes to start: two
were too few for a dashboard on a machine with a load of a hundred. Ready means that it may get new clients. A relay has
started when it reaches the cluster: the programs of its Pod wait for that. */}}
{{- define "memoire.probes" -}}
startupProbe:
  httpGet: {path: {{ ternary "/readyz" "/livez" (eq (default "" .role) "relay") }}, port: probes}
  periodSeconds: 1
  timeoutSeconds: 5
  failureThreshold: 600
livenessProbe:
  httpGet: {path: /livez, port: probes}
  periodSeconds: 10
  timeoutSeconds: 15
  failureThreshold: 5
readinessProbe:
  httpGet: {path: /readyz, port: probes}
  periodSeconds: 5
  timeoutSeconds: 5
{{- end }}

{{/* A Pod behind a Service waits before it ends, because new clients still arrive until all nodes know that it ends. */}}
{{- define "memoire.lingers" -}}
{{- if semverCompare ">=1.30-0" .Capabilities.KubeVersion.Version -}}
lifecycle: {preStop: {sleep: {seconds: 5}}}
{{- end -}}
{{- end }}

{{/* Keys and tokens as files. The Pod waits for a missing Secret, and its events name the Secret. Takes (dict "root" $
"keys" <whether it has keys> "tokens" <whether it opens pages>). */}}
{{- define "memoire.secretMounts" -}}
{{- if and .keys (include "memoire.keys" .root) }}
- {name: keys, mountPath: /etc/memoire/keys, readOnly: true}
{{- end }}
{{- if and .tokens (include "memoire.tokens" .root) }}
- {name: tokens, mountPath: /etc/memoire/tokens, readOnly: true}
{{- end }}
{{- end }}

{{/* Volumes of a Pod: those of every Pod, keys of a role, and the user's. Takes (dict "root" $ "keys" <role>
"values" <its> "volumes" <list> "settings" <whether the settings file is there> "tokens" <list of those that it needs>). */}}
{{- define "memoire.volumes" -}}
- {name: tmp, emptyDir: {}}
{{- if .settings }}
- {name: settings, configMap: {name: {{ include "memoire.fullname" .root }}}}
{{- end }}
{{- with .volumes }}
{{ toYaml . }}
{{- end }}
{{- if and .keys (include "memoire.keys" .root) }}
- name: keys
  secret: {secretName: {{ include "memoire.keys" .root }}-{{ .keys }}, defaultMode: 0440}
{{- end }}
{{- if and .tokens (include "memoire.tokens" .root) }}
- name: tokens
  secret:
    secretName: {{ include "memoire.tokens" .root }}
    defaultMode: 0440
    items:
      {{- range .tokens }}
      - {key: {{ . }}, path: {{ . }}}
      {{- end }}
{{- end }}
{{- with .values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Ports on which a node takes clients, and those of its pages. */}}
{{- define "memoire.ports" -}}
- {name: requests, containerPort: 5560}
- {name: caches, containerPort: 5561}
- {name: notices, containerPort: 5562}
{{- end }}

{{- define "memoire.pagePorts" -}}
- {name: http, containerPort: 8080}
- {name: probes, containerPort: 8081}
{{- end }}

{{/* Memory for held data of a size, and for the process itself. Takes (list <bytes> <base>); in Mi. */}}
{{- define "memoire.replay.memory" -}}
{{- $held := int64 (include "memoire.bytes" (index . 0)) -}}
{{- printf "%dMi" (add (div (add $held 1048575) 1048576) (index . 1)) -}}
{{- end }}

{{/* Requests and limits of a component. Takes (list <what is said> <what follows from what it holds>). Limits that are said stand by
themselves; requests alone replace single requests, and whatever else follows stays. */}}
{{- define "memoire.resources" -}}
{{- $said := index . 0 -}}
{{- $computed := index . 1 -}}
{{- if kindIs "invalid" $said -}}
{{- toYaml $computed -}}
{{- else if and $said.requests (not (hasKey $said "limits")) -}}
{{- mergeOverwrite (deepCopy $computed) $said | toYaml -}}
{{- else -}}
{{- toYaml $said -}}
{{- end -}}
{{- end }}

{{- define "memoire.resources.server" -}}
{{- include "memoire.resources" (list .Values.server.resources (include "memoire.serverResources" .Values.server.heldBytes | fromYaml)) -}}
{{- end }}

{{/* A proxy may have a queue of 256 MiB for each server, and 1 GiB of models. */}}
{{- define "memoire.resources.proxy" -}}
{{- $servers := len (include "memoire.servers" . | trim | splitList "\n") -}}
{{- $computed := dict "requests" (dict "cpu" "200m" "memory" "256Mi") "limits" (dict "memory" (printf "%dMi" (add 1280 (mul 256 $servers)))) -}}
{{- include "memoire.resources" (list .Values.proxy.resources $computed) -}}
{{- end }}

{{- define "memoire.resources.dashboard" -}}
{{- $computed := dict "requests" (dict "cpu" "100m" "memory" "192Mi") "limits" (dict "memory" "1Gi") -}}
{{- include "memoire.resources" (list .Values.dashboard.resources $computed) -}}
{{- end }}

{{/* Thousandths of a quantity, such as 500m, 2 or 1Gi, to compare two of them; empty if it is written in another way. */}}
{{- define "memoire.thousandths" -}}
{{- $text := toString . -}}
{{- if regexMatch "^[0-9]+(\\.[0-9]+)?m$" $text -}}
{{- trimSuffix "m" $text | float64 | ceil | int64 -}}
{{- else if regexMatch "^[0-9]+(\\.[0-9]+)?(k|M|G|T|Ki|Mi|Gi|Ti)?$" $text -}}
{{- $unit := regexFind "[A-Za-z]*$" $text -}}
{{- $units := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- mulf (float64 (trimSuffix $unit $text)) (get $units $unit) 1000 | ceil | int64 -}}
{{- end -}}
{{- end }}

{{/* What a server needs that holds so many bytes: as much as it holds and what Python takes; at most, what may be on the
way (256 MiB) and models (1 GiB) beside it. */}}
{{- define "memoire.serverResources" -}}
requests: {cpu: 250m, memory: {{ include "memoire.replay.memory" (list . 384) }}}
limits: {memory: {{ include "memoire.replay.memory" (list . 1664) }}}
{{- end }}

{{/* The common part of the Pods of the hooks for keys. Takes (dict "root" $ "name" "keys" "words" <list> "volume" <dict> "path" <where it is mounted>). */}}
{{- define "memoire.hookSpec" -}}
{{- $root := .root -}}
restartPolicy: Never
automountServiceAccountToken: false
enableServiceLinks: false
{{- with include "memoire.pullSecrets" $root | fromYamlArray }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- toYaml $root.Values.podSecurityContext | nindent 2 }}
containers:
  - name: {{ .name }}
    image: {{ include "memoire.image" (dict "root" $root "image" $root.Values.image) }}
    imagePullPolicy: {{ $root.Values.image.pullPolicy }}
    args:
      {{- toYaml .words | nindent 6 }}
    terminationMessagePolicy: FallbackToLogsOnError
    {{- with $root.Values.security.hooks.resources }}
    resources:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    securityContext:
      {{- toYaml $root.Values.containerSecurityContext | nindent 6 }}
    volumeMounts:
      - {name: tmp, mountPath: /tmp}
      - {name: {{ .volume.name }}, mountPath: {{ .path }}, readOnly: true}
volumes:
  - {name: tmp, emptyDir: {}}
  -
    {{- toYaml .volume | nindent 4 }}
{{- end }}
