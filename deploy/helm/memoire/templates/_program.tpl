{{/*
A container with a program of the user's: a learner or an actor. It is told where to connect and where its keys are by
its environment. Takes (dict "root" $ "name" "actor" "values" <its values> "endpoint" <address> "env" <list>
"mounts" <list> "server" <whether it takes clients itself> "ports" <list of more of them>).
*/}}
{{- define "memoire.program" -}}
{{- $root := .root -}}
{{- $values := .values -}}
name: {{ .name }}
image: {{ include "memoire.image" (dict "root" $root "image" $values.image) }}
imagePullPolicy: {{ $values.image.pullPolicy }}
{{- with $values.command }}
command:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.args }}
args:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $env := list (dict "name" "MEMOIRE_ENDPOINT" "value" .endpoint) (dict "name" "MEMOIRE_NAME" "valueFrom" (dict "fieldRef" (dict "fieldPath" "metadata.name"))) }}
{{- if (include "memoire.keys" $root) }}
{{- $env = append $env (dict "name" "MEMOIRE_KEYS" "value" "/etc/memoire/keys") }}
{{- end }}
{{- if and $root.Values.inference.enabled (ne .name "inference") }}
{{- $env = append $env (dict "name" "MEMOIRE_INFERENCE" "value" (include "memoire.inference" $root)) }}
{{- end }}
{{- if or $values.pages .server }}
{{- $env = concat $env (list (dict "name" "MEMOIRE_HTTP" "value" "*:8080") (dict "name" "MEMOIRE_PROBES" "value" "*:8081")) }}
{{- if (include "memoire.tokens" $root) }}
{{- $env = append $env (dict "name" "MEMOIRE_HTTP_TOKEN_FILE" "value" "/etc/memoire/tokens/nodes") }}
{{- end }}
{{- end }}
env:
  {{- include "memoire.env" (concat $env (default list .env) $values.extraEnv) | nindent 2 }}
{{- $ports := concat (default list .ports) (ternary (include "memoire.ports" . | fromYamlArray) list (default false .server)) (ternary (include "memoire.pagePorts" . | fromYamlArray) list (or $values.pages (default false .server))) }}
{{- with $ports }}
ports:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.resources }}
resources:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- include "memoire.containerSecurity" (dict "root" $root "values" $values "base" (dict "readOnlyRootFilesystem" false)) | nindent 2 }}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  {{- with .mounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- include "memoire.secretMounts" (dict "root" $root "keys" true "tokens" (or $values.pages .server)) | nindent 2 }}
  {{- with $values.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- $probes := dict }}
{{- if or $values.pages .server }}
{{- $probes = include "memoire.probes" . | fromYaml }}
{{- end }}
{{- range $name, $said := $values.probes }}
{{- /* A probe has only one kind of check. */}}
{{- if and (kindIs "map" $said) (hasKey $probes $name) (or $said.exec $said.tcpSocket $said.grpc) }}{{ $_ := unset (get $probes $name) "httpGet" }}{{ end }}
{{- end }}
{{- with mergeOverwrite $probes $values.probes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Variables with the rank of a Pod of several learners, as torchrun sets them. Takes (dict "root" $ "replicas" 2 "isJob" false
"first" <host name of the first Pod>). */}}
{{- define "memoire.ranks" -}}
{{- $index := ternary "batch.kubernetes.io/job-completion-index" "apps.kubernetes.io/pod-index" .isJob -}}
- {name: RANK, valueFrom: {fieldRef: {fieldPath: "metadata.labels['{{ $index }}']"}}}
- {name: LOCAL_RANK, value: "0"}
- {name: LOCAL_WORLD_SIZE, value: "1"}
- {name: WORLD_SIZE, value: {{ .replicas | quote }}}
- {name: MASTER_ADDR, value: "{{ .first }}.{{ .root.Release.Namespace }}.svc"}
- {name: MASTER_PORT, value: "29500"}
{{- end }}
