{{- define "forkpoint.secret" -}}
{{- if .Values.token }}{{ .Release.Name }}-token{{ else }}{{ .Values.existingSecret }}{{ end -}}
{{- end -}}
