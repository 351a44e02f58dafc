{{/*
The settings file that all of memoire's own containers read, and each role's part of it, as YAML. Keys are the flags of
the commands; `settings` of a component wins over what the chart says.
*/}}

{{- define "memoire.settings" -}}
{{- $all := dict -}}
{{- if .Values.security.insecure }}{{ $_ := set $all "insecure" true }}{{ end -}}
{{- if .Values.server.enabled }}{{ $_ := set $all "server" (include "memoire.settings.server" . | fromYaml) }}{{ end -}}
{{- $_ := set $all "proxy" (include "memoire.settings.proxy" . | fromYaml) -}}
{{- if .Values.dashboard.enabled }}{{ $_ := set $all "dashboard" (include "memoire.settings.dashboard" . | fromYaml) }}{{ end -}}
{{- $actors := include "memoire.actors" . | fromYaml -}}
{{- if and $actors.enabled $actors.relay.enabled }}{{ $_ := set $all "relay" (include "memoire.settings.relay" . | fromYaml) }}{{ end -}}
{{- toYaml $all -}}
{{- end }}

{{- define "memoire.settings.pages" -}}
http: "*:8080"
probes: "*:8081"
{{- if include "memoire.tokens" . }}
http-token-file: /etc/memoire/tokens/nodes
{{- end }}
{{- end }}

{{- define "memoire.settings.server" -}}
{{- $v := .Values.server -}}
{{- $said := include "memoire.settings.pages" . | fromYaml -}}
{{- $said = merge $said (dict "endpoint" "tcp://*:5560" "byte-limit" (include "memoire.bytes" $v.heldBytes | int64)) -}}
{{- if ne (int $v.ioThreads) 1 }}{{ $_ := set $said "io-threads" (int64 $v.ioThreads) }}{{ end -}}
{{- if $v.tables }}{{ $_ := set $said "tables" $v.tables }}{{ else }}{{ $_ := set $said "storage" $v.storage }}{{ end -}}
{{- if $v.onFull }}{{ $_ := set $said "on-full" $v.onFull }}{{ end -}}
{{- if $v.schema }}{{ $_ := set $said "schema" $v.schema }}{{ end -}}
{{- if $v.env }}{{ $_ := set $said "env" $v.env }}{{ end -}}
{{- if $v.parameters }}{{ $_ := set $said "set" (deepCopy $v.parameters) }}{{ end -}}
{{- if include "memoire.demo" . }}{{ $said = merge $said (include "memoire.demo.server" . | fromYaml) }}{{ end -}}
{{- if $v.capacity }}{{ $_ := set $said "capacity" (int64 $v.capacity) }}{{ end -}}
{{- if .Values.inference.enabled }}{{ $_ := set $said "inference" (list (include "memoire.inference" .)) }}{{ end -}}
{{- if $v.run }}{{ $_ := set $said "run" $v.run }}{{ end -}}
{{- if $v.persistence.enabled }}{{ $_ := set $said "state-dir" "/var/lib/memoire/state" }}{{ end -}}
{{- if $v.snapshots.atEnd }}{{ $_ := set $said "snapshot-caches" true }}{{ end -}}
{{- /* The Pod's grace period, less the time until the signal arrives and after everything is closed. */ -}}
{{- if $v.snapshots.atEnd }}{{ $_ := set $said "close-timeout" (sub (int64 $v.terminationGracePeriodSeconds) 7) }}{{ end -}}
{{- if $v.snapshots.everySeconds }}{{ $_ := set $said "snapshot-every" $v.snapshots.everySeconds }}{{ end -}}
{{- mergeOverwrite $said $v.settings | toYaml -}}
{{- end }}

{{- define "memoire.settings.proxy" -}}
{{- $said := merge (include "memoire.settings.pages" . | fromYaml) (dict "endpoint" "tcp://*:5560" "servers-file" "/etc/memoire/settings/servers.txt") -}}
{{- if ne (int .Values.proxy.ioThreads) 1 }}{{ $_ := set $said "io-threads" (int64 .Values.proxy.ioThreads) }}{{ end -}}
{{- mergeOverwrite $said .Values.proxy.settings | toYaml -}}
{{- end }}

{{- define "memoire.settings.relay" -}}
{{- $said := merge (include "memoire.settings.pages" . | fromYaml) (dict "endpoint" "ipc:///run/memoire/relay" "servers" (list (include "memoire.endpoint" .))) -}}
{{- mergeOverwrite $said .Values.actors.relay.settings | toYaml -}}
{{- end }}

{{- define "memoire.settings.dashboard" -}}
{{- $v := .Values.dashboard -}}
{{- $nodes := list (printf "dns:%s-proxy.%s.svc:8080" (include "memoire.fullname" .) .Release.Namespace) -}}
{{- if or .Values.server.enabled .Values.learner.embedsServer -}}
{{- $nodes = prepend $nodes (printf "dns:%s.%s.svc:8080" (include "memoire.servers.name" .) .Release.Namespace) -}}
{{- end -}}
{{- $learner := include "memoire.learner" . | fromYaml -}}
{{- if and $learner.enabled $learner.pages (not $learner.embedsServer) -}}
{{- $nodes = append $nodes (printf "dns:%s-learner.%s.svc:8080" (include "memoire.fullname" .) .Release.Namespace) -}}
{{- end -}}
{{- if and .Values.inference.enabled .Values.inference.pages -}}
{{- $nodes = append $nodes (printf "dns:%s-inference-nodes.%s.svc:8080" (include "memoire.fullname" .) .Release.Namespace) -}}
{{- end -}}
{{- $said := dict "nodes" (concat $nodes $v.nodes) "listen" "*:8265" "probes" "*:8081" -}}
{{- if include "memoire.tokens" . }}{{ $_ := set $said "token-file" "/etc/memoire/tokens/dashboard" }}{{ $_ := set $said "node-token-file" "/etc/memoire/tokens/nodes" }}{{ end -}}
{{- if $v.persistence.enabled }}{{ $_ := set $said "history" "/var/lib/memoire/history.db" }}{{ end -}}
{{- $path := coalesce $v.rootPath (ternary (trimSuffix "/" $v.ingress.path) "" $v.ingress.enabled) (ternary (trimSuffix "/" $v.httpRoute.path) "" $v.httpRoute.enabled) -}}
{{- if $path }}{{ $_ := set $said "root-path" $path }}{{ end -}}
{{- $hosts := $v.hosts -}}
{{- if $v.ingress.enabled }}{{ $hosts = concat $hosts $v.ingress.hosts }}{{ end -}}
{{- if $v.httpRoute.enabled }}{{ $hosts = concat $hosts $v.httpRoute.hostnames }}{{ end -}}
{{- /* Without a token, the dashboard answers only known host names. */ -}}
{{- if or $hosts (not (include "memoire.tokens" .)) -}}
{{- $service := printf "%s-dashboard" (include "memoire.fullname" .) -}}
{{- $own := list $service (printf "%s.%s" $service .Release.Namespace) (printf "%s.%s.svc" $service .Release.Namespace) -}}
{{- $_ := set $said "allow-host" (concat $hosts $own | uniq) -}}
{{- end -}}
{{- $expected := $v.expectedActors -}}
{{- if kindIs "invalid" $expected }}{{ $actors := include "memoire.actors" . | fromYaml }}{{ $expected = ternary (mul $actors.replicas $actors.processes) 0 $actors.enabled }}{{ end -}}
{{- if $expected }}{{ $_ := set $said "expected-actors" (int64 $expected) }}{{ end -}}
{{- $servers := $v.expectedServers -}}
{{- if kindIs "invalid" $servers }}{{ $servers = ternary $learner.replicas (ternary .Values.server.replicas 0 .Values.server.enabled) $learner.embedsServer }}{{ end -}}
{{- if $servers }}{{ $_ := set $said "expected-servers" (int64 $servers) }}{{ end -}}
{{- $proxies := $v.expectedProxies -}}
{{- if kindIs "invalid" $proxies }}{{ $proxies = include "memoire.replicas.least" .Values.proxy }}{{ end -}}
{{- if $proxies }}{{ $_ := set $said "expected-proxies" (int64 $proxies) }}{{ end -}}
{{- $acting := $v.expectedInference -}}
{{- if kindIs "invalid" $acting }}{{ $acting = ternary (include "memoire.replicas.least" .Values.inference) "0" (and .Values.inference.enabled .Values.inference.pages) }}{{ end -}}
{{- if int $acting }}{{ $_ := set $said "expected-inference" (int64 $acting) }}{{ end -}}
{{- if $v.goalSteps }}{{ $_ := set $said "goal-steps" (int64 $v.goalSteps) }}{{ end -}}
{{- if $v.goalEpisodes }}{{ $_ := set $said "goal-episodes" (int64 $v.goalEpisodes) }}{{ end -}}
{{- mergeOverwrite $said $v.settings | toYaml -}}
{{- end }}

{{/* The annotation that restarts Pods when their part of the settings changes. Takes (dict "root" $ "role" "server"). */}}
{{- define "memoire.settings.checksum" -}}
checksum/settings: {{ include (printf "memoire.settings.%s" .role) .root | sha256sum }}
{{- end }}
