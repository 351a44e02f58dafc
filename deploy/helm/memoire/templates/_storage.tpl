{{/* The claims of a StatefulSet. They have no label of a version: claims cannot be changed. Takes (dict "root" $ "persistence" <dict>). */}}
{{- define "memoire.claims" -}}
{{- if .persistence.enabled }}
persistentVolumeClaimRetentionPolicy:
  whenDeleted: {{ .persistence.whenDeleted }}
  whenScaled: {{ .persistence.whenScaled }}
volumeClaimTemplates:
  - metadata:
      name: state
      labels:
        {{- include "memoire.selector" (dict "root" .root) | nindent 8 }}
      {{- with .persistence.annotations }}
      annotations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
    spec:
      {{- include "memoire.claimSpec" .persistence | nindent 6 }}
{{- end }}
{{- end }}

{{- define "memoire.claimSpec" -}}
accessModes:
  {{- toYaml .accessModes | nindent 2 }}
resources:
  requests: {storage: {{ .size | quote }}}
{{- if not (kindIs "invalid" .storageClass) }}
storageClassName: {{ .storageClass | quote }}
{{- end }}
{{- end }}
