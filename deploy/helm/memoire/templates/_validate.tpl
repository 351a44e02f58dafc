{{/* Checks that the schema cannot express: all wrong values at once, each with advice. */}}
{{- define "memoire.validate" -}}
{{- $wrong := list -}}
{{- $v := .Values -}}
{{- $hasServers := or $v.server.enabled $v.learner.embedsServer -}}

{{- if and $v.security.insecure (or $v.security.keys $v.security.tokens) -}}
{{- $wrong = append $wrong "security.insecure=true excludes security.keys and security.tokens: leave out the one that you do not want" -}}
{{- end -}}
{{- if and $v.security.insecure (or $v.dashboard.ingress.enabled $v.dashboard.httpRoute.enabled (ne $v.dashboard.service.type "ClusterIP") (ne $v.proxy.service.type "ClusterIP")) -}}
{{- $wrong = append $wrong "security.insecure is true, but a service is open to the outside (dashboard.ingress, dashboard.httpRoute, dashboard.service.type or proxy.service.type): leave out security.insecure, and the chart makes keys and tokens" -}}
{{- end -}}

{{- if and $v.server.enabled $v.learner.embedsServer -}}
{{- $wrong = append $wrong "learner.embedsServer is true, so the learner is the server: set server.enabled=false" -}}
{{- end -}}
{{- if and $v.learner.embedsServer (not $v.learner.enabled) -}}
{{- $wrong = append $wrong "learner.embedsServer is true, but learner.enabled is false, so there is no server: set learner.enabled=true" -}}
{{- end -}}
{{- if and (not $hasServers) (not $v.proxy.servers) -}}
{{- $wrong = append $wrong "there is no server: set server.enabled=true, or learner.embedsServer=true, or proxy.servers to the addresses of other servers" -}}
{{- end -}}
{{- if and $v.server.enabled (not (include "memoire.demo" .)) (ne 1 (len (compact (list (gt (len $v.server.schema) 0 | ternary "schema" "") (ternary "env" "" (ne $v.server.env "")) (gt (len $v.server.tables) 0 | ternary "tables" ""))))) -}}
{{- $wrong = append $wrong "servers need the schema of an entry: set one of server.schema (the output of Schema.to_json()), server.env (a Gymnasium environment) and server.tables. Without any of them the demo runs, if demo.enabled is true and your learner and actors are not enabled" -}}
{{- end -}}
{{- if and $v.server.tables (or $v.server.parameters $v.server.capacity) -}}
{{- $wrong = append $wrong "server.parameters and server.capacity apply to a single table: set them for each table in server.tables" -}}
{{- end -}}
{{- if and $v.server.onFull $v.server.tables -}}
{{- $wrong = append $wrong "server.onFull applies to a single table: set on_full of the tables in server.tables" -}}
{{- end -}}
{{- if and (or $v.server.snapshots.atEnd $v.server.snapshots.everySeconds) (not $v.server.persistence.enabled) -}}
{{- $wrong = append $wrong "server.snapshots needs a state folder: set server.persistence.enabled=true" -}}
{{- end -}}
{{- if hasKey $v.server.settings "byte-limit" -}}
{{- $wrong = append $wrong "server.settings.byte-limit is set by server.heldBytes, from which the memory of the Pods follows: set server.heldBytes" -}}
{{- end -}}
{{- $own := 0 -}}
{{- range $v.server.tables -}}
{{- with .byte_limit -}}{{- $own = add $own (include "memoire.bytes" (regexReplaceAll "B$" (toString (ternary (int64 .) . (kindIs "float64" .))) "")) -}}{{- end -}}
{{- end -}}
{{- if gt (int64 $own) (int64 (include "memoire.bytes" $v.server.heldBytes)) -}}
{{- $wrong = append $wrong (printf "server.tables have a total byte_limit of %d bytes, above server.heldBytes=%s, from which the memory of the Pods follows: raise server.heldBytes" (int64 $own) (toString $v.server.heldBytes)) -}}
{{- end -}}
{{- $server := include "memoire.resources.server" . | fromYaml -}}
{{- $proxy := include "memoire.resources.proxy" . | fromYaml -}}
{{- with (default dict $server.limits).memory -}}
{{- $least := add (include "memoire.bytes" $v.server.heldBytes) 268435456 -}}
{{- if lt (int64 (include "memoire.bytes" .)) $least -}}
{{- $wrong = append $wrong (printf "server.resources.limits.memory is %s, but a server with server.heldBytes=%s needs at least %dMi: raise the limit, or lower heldBytes" (toString .) (toString $v.server.heldBytes) (div $least 1048576)) -}}
{{- end -}}
{{- end -}}

{{- $asked := dict "server" $server "proxy" $proxy "dashboard" (include "memoire.resources.dashboard" . | fromYaml) "server.drain" $v.server.drain.resources "learner" $v.learner.resources "actors" $v.actors.resources "inference" $v.inference.resources "actors.relay" $v.actors.relay.resources "demo" $v.demo.resources "test" $v.test.resources "security.hooks" $v.security.hooks.resources -}}
{{- range $name, $resources := $asked -}}
{{- $resources = default dict $resources -}}
{{- $limits := default dict $resources.limits -}}
{{- range $what, $requested := default dict $resources.requests -}}
{{- $limit := get $limits $what -}}
{{- $most := ternary "" (include "memoire.thousandths" $limit) (not (hasKey $limits $what)) -}}
{{- $least := include "memoire.thousandths" $requested -}}
{{- if and $most $least (lt (int64 $most) (int64 $least)) -}}
{{- $wrong = append $wrong (printf "%s.resources: the limit of %s is %s, below the request of %s: set %s.resources.limits.%s to at least %s" $name $what (toString $limit) (toString $requested) $name $what (toString $requested)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- range $name, $resources := dict "proxy" $proxy "inference" (default dict $v.inference.resources) -}}
{{- $scaling := (get $v $name).autoscaling -}}
{{- if and $scaling.enabled (gt (int $scaling.minReplicas) (int $scaling.maxReplicas)) -}}
{{- $wrong = append $wrong (printf "%s.autoscaling.minReplicas is %d, above maxReplicas %d" $name (int $scaling.minReplicas) (int $scaling.maxReplicas)) -}}
{{- end -}}
{{- $more := ternary "keda.triggers" "metrics" $scaling.keda.enabled -}}
{{- if and $scaling.enabled (not $scaling.targetCPU) (not (ternary $scaling.keda.triggers $scaling.metrics $scaling.keda.enabled)) -}}
{{- $wrong = append $wrong (printf "%s.autoscaling has neither targetCPU nor %s, so it would never scale: set one of them" $name $more) -}}
{{- end -}}
{{- if and $scaling.keda.enabled (not $scaling.enabled) -}}
{{- $wrong = append $wrong (printf "%s.autoscaling.keda.enabled is true: set %s.autoscaling.enabled=true, too" $name $name) -}}
{{- end -}}
{{- if and $scaling.keda.enabled $scaling.metrics -}}
{{- $wrong = append $wrong (printf "%s.autoscaling.metrics needs a HorizontalPodAutoscaler, but %s.autoscaling.keda.enabled creates none: write the metrics as %s.autoscaling.keda.triggers" $name $name $name) -}}
{{- end -}}
{{- range $scaling.keda.triggers -}}
{{- if and (has .type (list "cpu" "memory")) (eq (len $scaling.keda.triggers) 1) -}}
{{- $wrong = append $wrong (printf "%s.autoscaling.keda.triggers has only cpu or memory, for which KEDA allows no fallback: use a HorizontalPodAutoscaler instead (targetCPU and metrics, without keda)" $name) -}}
{{- end -}}
{{- end -}}
{{- if and $scaling.enabled $scaling.targetCPU (not (default dict $resources.requests).cpu) (not (default dict $resources.limits).cpu) -}}
{{- $wrong = append $wrong (printf "%s.autoscaling.targetCPU is per cent of the requested CPU: set %s.resources.requests.cpu" $name $name) -}}
{{- end -}}
{{- end -}}

{{- range $name := list "learner" "actors" "inference" -}}
{{- $their := get $v $name -}}
{{- if and $their.enabled (not $their.image.repository) -}}
{{- $wrong = append $wrong (printf "%s.enabled is true: set %s.image.repository (and tag) to an image with your program" $name $name) -}}
{{- end -}}
{{- end -}}

{{- if and $v.actors.pages $v.actors.relay.enabled -}}
{{- $wrong = append $wrong "actors.pages and actors.relay.enabled are both true, but both use the same ports of the Pod: set one of them to false" -}}
{{- end -}}

{{- if and $v.inference.enabled (eq (toString $v.inference.rollingUpdate.maxUnavailable) "0") (eq (toString $v.inference.rollingUpdate.maxSurge) "0") -}}
{{- $wrong = append $wrong "inference.rollingUpdate has maxUnavailable 0 and maxSurge 0, so no Pod could be replaced: set one of them to 1" -}}
{{- end -}}

{{- if and (eq $v.learner.kind "Job") (or $v.learner.embedsServer $v.learner.persistence.enabled) -}}
{{- $wrong = append $wrong "learner.kind is Job, whose Pods have no permanent names and volumes: set learner.kind=StatefulSet for learner.embedsServer and learner.persistence" -}}
{{- end -}}

{{- if and $v.dashboard.httpRoute.enabled (not $v.dashboard.httpRoute.parentRefs) -}}
{{- $wrong = append $wrong "dashboard.httpRoute.enabled is true: set dashboard.httpRoute.parentRefs to its Gateway" -}}
{{- end -}}
{{- if and (or $v.dashboard.ingress.enabled $v.dashboard.httpRoute.enabled) (not $v.dashboard.enabled) -}}
{{- $wrong = append $wrong "dashboard.ingress or dashboard.httpRoute is enabled, but dashboard.enabled is false: set it to true" -}}
{{- end -}}

{{- if $wrong -}}
{{- fail (printf "\n\nThese values are not valid:\n\n- %s\n" (join "\n- " $wrong)) -}}
{{- end -}}
{{- end }}
