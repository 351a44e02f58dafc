{{/*
Names and labels. Everything of a release begins with `memoire.fullname`; 42 characters leave room for the longest suffix
and for the hash that a StatefulSet adds in a label.
*/}}

{{- define "memoire.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 42 | trimSuffix "-" -}}
{{- end }}

{{- define "memoire.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 42 | trimSuffix "-" -}}
{{- else if contains (include "memoire.name" .) .Release.Name -}}
{{- .Release.Name | trunc 42 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "memoire.name" .) | trunc 42 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{/* Labels that select a component's Pods, without a version, because selectors cannot be changed. Takes (dict "root" $ "component" "server"). */}}
{{- define "memoire.selector" -}}
app.kubernetes.io/name: {{ include "memoire.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end }}

{{/* The selector and descriptive labels, for metadata of objects that may change at an upgrade. */}}
{{- define "memoire.labels" -}}
{{ include "memoire.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: memoire
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "memoire.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "memoire.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end }}

{{/* Prefix of the Secrets with keys, and the Secret with tokens: given ones, or those that a hook makes. Empty without security. */}}
{{- define "memoire.keys" -}}
{{- if not .Values.security.insecure }}{{ default (printf "%s-keys" (include "memoire.fullname" .)) .Values.security.keys }}{{ end -}}
{{- end }}

{{- define "memoire.tokens" -}}
{{- if not .Values.security.insecure }}{{ default (printf "%s-tokens" (include "memoire.fullname" .)) .Values.security.tokens }}{{ end -}}
{{- end }}

{{/* The roles that have a key, the same as in memoire.security.keys. */}}
{{- define "memoire.roles" -}}
[actor, server, learner, reader, proxy, inference]
{{- end }}

{{/* "true" if the demo runs, else empty. A schema, a learner or actors in the values replace the demo. */}}
{{- define "memoire.demo" -}}
{{- $s := .Values.server -}}
{{- if and .Values.demo.enabled $s.enabled (not (or $s.schema $s.env $s.tables .Values.learner.enabled .Values.learner.embedsServer .Values.actors.enabled)) }}true{{ end -}}
{{- end }}

{{/* The demo's image, by default with the registry and tag of memoire's own. */}}
{{- define "memoire.demo.image" -}}
{{- $image := deepCopy .Values.demo.image -}}
{{- $_ := set $image "registry" (default .Values.image.registry $image.registry) -}}
{{- $_ := set $image "tag" (default .Values.image.tag $image.tag) -}}
{{- toYaml $image -}}
{{- end }}

{{/* Values of the learner and of the actors, as YAML: the user's, or those of the demo's programs. Both serve pages, so they are probed. */}}
{{- define "memoire.learner" -}}
{{- $learner := deepCopy .Values.learner -}}
{{- if include "memoire.demo" . -}}
{{- $said := dict "enabled" true "pages" true "image" (include "memoire.demo.image" . | fromYaml) "resources" .Values.demo.resources -}}
{{- $_ := set $said "command" (list "python3" "-m" "memoire.rl.demo.learner") -}}
{{- $_ := set $said "args" (list "$(MEMOIRE_ENDPOINT)" "--actions=2" "--patience=120" "--checkpoint=/tmp/network") -}}
{{- $learner = mergeOverwrite $learner $said -}}
{{- end -}}
{{- toYaml $learner -}}
{{- end }}

{{- define "memoire.actors" -}}
{{- $actors := deepCopy .Values.actors -}}
{{- if include "memoire.demo" . -}}
{{- $said := dict "enabled" true "pages" true "replicas" (int .Values.demo.actors) "image" (include "memoire.demo.image" . | fromYaml) "resources" .Values.demo.resources -}}
{{- $_ := set $said "relay" (dict "enabled" false) -}}
{{- $_ := set $said "command" (list "python3" "-m" "memoire.rl.demo.actor") -}}
{{- $_ := set $said "args" (list "$(MEMOIRE_ENDPOINT)" "--env=CartPole-v1" "--patience=120") -}}
{{- $actors = mergeOverwrite $actors $said -}}
{{- end -}}
{{- toYaml $actors -}}
{{- end }}

{{/* Table of the demo's servers: the steps of CartPole-v1, with small caches so that the learner is not far behind. */}}
{{- define "memoire.demo.server" -}}
schema:
  columns: [[obs, "<f4", [4], state], [action, "<i8", [], plain], [reward, "<f4", [], reward]]
  tuples: []
set: {multi_step: 3, discount: [0.99], samples_per_insert: 8, cache_size: 1024}
cache-limit: 32
{{- end }}

{{/* A reference to an image. Takes (dict "root" $ "image" <image of a component, or the chart's>). */}}
{{- define "memoire.image" -}}
{{- $global := default dict .root.Values.global -}}
{{- $registry := default (default "" .image.registry) $global.imageRegistry -}}
{{- if not .image.repository }}{{ include "memoire.validate" .root }}{{ end -}}
{{- $name := .image.repository -}}
{{- if $registry }}{{ $name = printf "%s/%s" (trimSuffix "/" $registry) $name }}{{ end -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $name .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name (default .root.Chart.AppVersion .image.tag | toString) -}}
{{- end -}}
{{- end }}

{{/* Bytes of a quantity such as 512Mi, 2G or 1000000, as a whole number. */}}
{{- define "memoire.bytes" -}}
{{- $text := toString . -}}
{{- $units := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $unit := regexFind "[A-Za-z]*$" $text -}}
{{- if not (and (hasKey $units $unit) (regexMatch "^[0-9]+(\\.[0-9]+)?[A-Za-z]*$" $text)) -}}
{{- fail (printf "%q is no size: give bytes as 1000000, 512Mi, 2G or 1.5Gi" $text) -}}
{{- end -}}
{{- mulf (float64 (trimSuffix $unit $text)) (get $units $unit) | ceil | int64 -}}
{{- end }}

{{/* Addresses of the pages of the components' Pods, and the address for actors, learners and readers. */}}
{{- define "memoire.endpoint" -}}
{{- printf "tcp://%s.%s.svc:5560" (include "memoire.fullname" .) .Release.Namespace -}}
{{- end }}

{{/* Address at which actors request actions. */}}
{{- define "memoire.inference" -}}
{{- printf "tcp://%s-inference.%s.svc:5570" (include "memoire.fullname" .) .Release.Namespace -}}
{{- end }}

{{/* The name of the StatefulSet whose Pods are the servers: the learner's if it embeds the server. */}}
{{- define "memoire.servers.name" -}}
{{- printf "%s-%s" (include "memoire.fullname" .) (ternary "learner" "server" .Values.learner.embedsServer) -}}
{{- end }}

{{/* Addresses of all servers for the proxies, one on each line. */}}
{{- define "memoire.servers" -}}
{{- $name := include "memoire.servers.name" . -}}
{{- $count := ternary .Values.learner.replicas .Values.server.replicas .Values.learner.embedsServer -}}
{{- if or .Values.server.enabled .Values.learner.embedsServer -}}
{{- range until (int $count) }}
{{ printf "tcp://%s-%d.%s.%s.svc:5560" $name . $name $.Release.Namespace }}
{{- end }}
{{- end }}
{{- range .Values.proxy.servers }}
{{ . }}
{{- end }}
{{- end }}
