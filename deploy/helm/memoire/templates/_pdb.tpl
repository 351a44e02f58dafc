{{/* Number of Pods of a component that may be away at a time. A single Pod gets none, because its node could not be drained then. */}}
{{- define "memoire.pdb" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "memoire.fullname" .root }}-{{ .component }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "memoire.labels" . | nindent 4 }}
spec:
  maxUnavailable: {{ .values.maxUnavailable }}
  selector:
    matchLabels:
      {{- include "memoire.selector" . | nindent 6 }}
{{- end }}
