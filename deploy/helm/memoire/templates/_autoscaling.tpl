{{/*
What changes the number of a Deployment's Pods. Each takes (dict "root" $ "component" "proxy" "values" <the component's>), and
makes nothing where the other one is meant.
*/}}

{{- define "memoire.hpa" -}}
{{- $scaling := .values.autoscaling -}}
{{- if and $scaling.enabled (not $scaling.keda.enabled) -}}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: {{ include "memoire.fullname" .root }}-{{ .component }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "memoire.labels" . | nindent 4 }}
spec:
  scaleTargetRef:
    apiVersion: apps/v1
    kind: Deployment
    name: {{ include "memoire.fullname" .root }}-{{ .component }}
  minReplicas: {{ $scaling.minReplicas }}
  maxReplicas: {{ $scaling.maxReplicas }}
  metrics:
    {{- if $scaling.targetCPU }}
    - type: Resource
      resource:
        name: cpu
        target: {type: Utilization, averageUtilization: {{ $scaling.targetCPU }}}
    {{- end }}
    {{- with $scaling.metrics }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $scaling.behavior }}
  behavior:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "memoire.scaledObject" -}}
{{- $scaling := .values.autoscaling -}}
{{- if and $scaling.enabled $scaling.keda.enabled -}}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  name: {{ include "memoire.fullname" .root }}-{{ .component }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "memoire.labels" . | nindent 4 }}
spec:
  scaleTargetRef:
    name: {{ include "memoire.fullname" .root }}-{{ .component }}
  minReplicaCount: {{ $scaling.minReplicas }}
  maxReplicaCount: {{ $scaling.maxReplicas }}
  pollingInterval: {{ $scaling.keda.pollingInterval }}
  {{- /* KEDA refuses a fallback if all triggers are CPU or memory, which it does not query itself. */}}
  {{- if $scaling.keda.triggers }}
  fallback:
    failureThreshold: {{ $scaling.keda.fallback.failureThreshold }}
    replicas: {{ default $scaling.maxReplicas $scaling.keda.fallback.replicas }}
  {{- end }}
  {{- with $scaling.behavior }}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior:
        {{- toYaml . | nindent 8 }}
  {{- end }}
  triggers:
    {{- if $scaling.targetCPU }}
    - type: cpu
      metricType: Utilization
      metadata: {value: {{ $scaling.targetCPU | quote }}}
    {{- end }}
    {{- with $scaling.keda.triggers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
{{- end }}

{{/* Smallest number of Pods. */}}
{{- define "memoire.replicas.least" -}}
{{- ternary .autoscaling.minReplicas .replicas .autoscaling.enabled -}}
{{- end }}
