{{- /* Labels that select a component's pods: they can never change. */ -}}
{{- define "radixfleet.selector" -}}
app.kubernetes.io/name: radixfleet
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- /* All labels of an object of a component. */ -}}
{{- define "radixfleet.labels" -}}
{{ include "radixfleet.selector" . }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
{{- end -}}

{{- /* Pod Security level restricted, for the pod and for its container. */ -}}
{{- define "radixfleet.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65534
runAsGroup: 65534
seccompProfile: {type: RuntimeDefault}
{{- end -}}
{{- define "radixfleet.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- /* Who a pod of ours is; the names are those of fleet_contract.names. */ -}}
{{- define "radixfleet.identity" -}}
- {name: RADIXFLEET_POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
- {name: RADIXFLEET_POD_UID, valueFrom: {fieldRef: {fieldPath: metadata.uid}}}
- {name: RADIXFLEET_NAMESPACE, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}}
- {name: RADIXFLEET_POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
- {name: HOME, value: /run/radixfleet}
- {name: TMPDIR, value: /run/radixfleet}
- {name: PYTHONUNBUFFERED, value: "1"}
- {name: PYTHONDONTWRITEBYTECODE, value: "1"}
{{- end -}}

{{- /* What the operator may do where services are. No secrets, no finalizers of its own. */ -}}
{{- define "radixfleet.operatorRules" -}}
- apiGroups: [radixfleet.io]
  resources: [inferenceservices]
  verbs: [get, list, watch]
- apiGroups: [radixfleet.io]
  resources: [inferenceservices/status]
  verbs: [patch]
# Owner references that block their owner's deletion need this where OwnerReferencesPermissionEnforcement is on.
- apiGroups: [radixfleet.io]
  resources: [inferenceservices/finalizers]
  verbs: [update]
- apiGroups: [apps]
  resources: [statefulsets, controllerrevisions]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services, configmaps]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, patch]
- apiGroups: [""]
  resources: [events]
  verbs: [create, list]
{{- end -}}
