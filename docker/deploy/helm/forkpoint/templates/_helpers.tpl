{{- define "forkpoint.secret" -}}
{{- if .Values.token }}{{ .Release.Name }}-token{{ else }}{{ .Values.existingSecret }}{{ end -}}
{{- end -}}
{{- define "forkpoint.kind" -}}
{{ .Values.cluster.kind | default "StatefulSet" }}
{{- end -}}
