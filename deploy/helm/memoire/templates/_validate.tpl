{{/* What the schema cannot say: all complaints about values at once, each with what to write instead. */}}
{{- define "memoire.validate" -}}
{{- $wrong := list -}}
{{- $v := .Values -}}
{{- $hasServers := or $v.server.enabled $v.learner.embedsServer -}}

{{- if and (not $v.security.insecure) (not (and $v.security.keys $v.security.tokens)) -}}
{{- $wrong = append $wrong (printf "this cluster would be open to everybody. Make keys and tokens in namespace %s:\n    memoire keys new --kubernetes memoire-keys | kubectl apply -f -\n    kubectl create secret generic memoire-tokens --from-literal=dashboard=$(openssl rand -hex 24) --from-literal=nodes=$(openssl rand -hex 24)\nand set security.keys=memoire-keys and security.tokens=memoire-tokens. Or, for a trial, say so: security.insecure=true" .Release.Namespace) -}}
{{- end -}}
{{- if and $v.security.insecure (or $v.security.keys $v.security.tokens) -}}
{{- $wrong = append $wrong "security.insecure is true, and security.keys or security.tokens is set: leave out the one that is not meant" -}}
{{- end -}}
{{- if and $v.security.insecure (or $v.dashboard.ingress.enabled $v.dashboard.httpRoute.enabled (ne $v.dashboard.service.type "ClusterIP") (ne $v.proxy.service.type "ClusterIP")) -}}
{{- $wrong = append $wrong "security.insecure is true, and a service is shown to the outside (dashboard.ingress, dashboard.httpRoute, dashboard.service.type or proxy.service.type): set security.keys and security.tokens" -}}
{{- end -}}

{{- if and $v.server.enabled $v.learner.embedsServer -}}
{{- $wrong = append $wrong "learner.embedsServer is true: set server.enabled=false, for the learner is the server then" -}}
{{- end -}}
{{- if and $v.learner.embedsServer (not $v.learner.enabled) -}}
{{- $wrong = append $wrong "learner.embedsServer is true and learner.enabled is not: there would be no server" -}}
{{- end -}}
{{- if and (not $hasServers) (not $v.proxy.servers) -}}
{{- $wrong = append $wrong "there is no server: set server.enabled=true, or learner.embedsServer=true, or proxy.servers to addresses of servers elsewhere" -}}
{{- end -}}
{{- if and $v.server.enabled (ne 1 (len (compact (list (gt (len $v.server.schema) 0 | ternary "schema" "") (ternary "env" "" (ne $v.server.env "")) (gt (len $v.server.tables) 0 | ternary "tables" ""))))) -}}
{{- $wrong = append $wrong "a server has to know what an entry is: set one of server.schema (what Schema.to_json() writes), server.env (a Gymnasium environment) and server.tables" -}}
{{- end -}}
{{- if and $v.server.tables (or $v.server.parameters $v.server.capacity) -}}
{{- $wrong = append $wrong "server.parameters and server.capacity are of the only table: beside server.tables each table has its own" -}}
{{- end -}}
{{- if and (or $v.server.snapshots.atEnd $v.server.snapshots.everySeconds) (not $v.server.persistence.enabled) -}}
{{- $wrong = append $wrong "server.snapshots need a state folder: set server.persistence.enabled=true" -}}
{{- end -}}
{{- with (default dict (default dict $v.server.resources).limits).memory -}}
{{- $least := add (include "memoire.bytes" $v.server.heldBytes) 268435456 -}}
{{- if lt (int64 (include "memoire.bytes" .)) $least -}}
{{- $wrong = append $wrong (printf "server.resources.limits.memory is %s, and a server that holds server.heldBytes=%s needs %dMi at least: raise it, or hold less" (toString .) (toString $v.server.heldBytes) (div $least 1048576)) -}}
{{- end -}}
{{- end -}}

{{- with $v.proxy.autoscaling -}}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) -}}
{{- $wrong = append $wrong (printf "proxy.autoscaling.minReplicas is %d, above maxReplicas %d" (int .minReplicas) (int .maxReplicas)) -}}
{{- end -}}
{{- $more := ternary "keda.triggers" "metrics" .keda.enabled -}}
{{- if and .enabled (not .targetCPU) (not (ternary .keda.triggers .metrics .keda.enabled)) -}}
{{- $wrong = append $wrong (printf "proxy.autoscaling has neither targetCPU nor %s: nothing would ever change" $more) -}}
{{- end -}}
{{- if and .keda.enabled (not .enabled) -}}
{{- $wrong = append $wrong "proxy.autoscaling.keda.enabled is true: set proxy.autoscaling.enabled=true, too" -}}
{{- end -}}
{{- if and .keda.enabled .metrics -}}
{{- $wrong = append $wrong "proxy.autoscaling.metrics are of a HorizontalPodAutoscaler, and proxy.autoscaling.keda.enabled makes none: write them as proxy.autoscaling.keda.triggers" -}}
{{- end -}}
{{- range .keda.triggers -}}
{{- if and (has .type (list "cpu" "memory")) (eq (len $v.proxy.autoscaling.keda.triggers) 1) -}}
{{- $wrong = append $wrong "proxy.autoscaling.keda.triggers has only cpu or memory, which KEDA takes no fallback for: that is what a HorizontalPodAutoscaler does (targetCPU and metrics, without keda)" -}}
{{- end -}}
{{- end -}}
{{- $requests := default dict (default dict $v.proxy.resources).requests -}}
{{- if and .enabled .targetCPU (not (kindIs "invalid" $v.proxy.resources)) (not $requests.cpu) -}}
{{- $wrong = append $wrong "proxy.autoscaling.targetCPU is per cent of the requested CPU: set proxy.resources.requests.cpu" -}}
{{- end -}}
{{- end -}}

{{- range $name := list "learner" "actors" -}}
{{- $their := get $v $name -}}
{{- if and $their.enabled (not $their.image.repository) -}}
{{- $wrong = append $wrong (printf "%s.enabled is true: set %s.image.repository (and tag) to an image with your program" $name $name) -}}
{{- end -}}
{{- end -}}

{{- if and $v.actors.pages $v.actors.relay.enabled -}}
{{- $wrong = append $wrong "actors.pages and actors.relay.enabled are both true, and a Pod has the pages' ports once: set one of them to false" -}}
{{- end -}}

{{- if and $v.dashboard.httpRoute.enabled (not $v.dashboard.httpRoute.parentRefs) -}}
{{- $wrong = append $wrong "dashboard.httpRoute.enabled is true: set dashboard.httpRoute.parentRefs to the Gateway that it belongs to" -}}
{{- end -}}
{{- if and (or $v.dashboard.ingress.enabled $v.dashboard.httpRoute.enabled) (not $v.dashboard.enabled) -}}
{{- $wrong = append $wrong "dashboard.ingress or dashboard.httpRoute is enabled, and dashboard.enabled is false" -}}
{{- end -}}

{{- if $wrong -}}
{{- fail (printf "\n\nvalues that cannot be:\n\n- %s\n" (join "\n- " $wrong)) -}}
{{- end -}}
{{- end }}
