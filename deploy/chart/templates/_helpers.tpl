{{- /* Parts of objects that several templates share. A workload is the name of a Deployment: gateway, inference-cpu. */ -}}

{{- /* Labels by which the pods of a workload are found. They may never change: Kubernetes refuses another selector of a
Deployment. */ -}}
{{- define "oriel.selector" -}}
app.kubernetes.io/name: oriel
{{- with regexFind "^[a-z]+" . }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- if hasPrefix "inference-" . }}
oriel.dev/model-group: {{ trimPrefix "inference-" . | quote }}
{{- end }}
{{- end }}

{{- /* Labels of all objects of a workload; of "", those of objects that belong to no workload. */ -}}
{{- define "oriel.labels" -}}
{{ include "oriel.selector" . }}
app.kubernetes.io/part-of: oriel
app.kubernetes.io/managed-by: Helm
{{- end }}

{{- /* Metadata of an object in the namespace; from (list ROOT NAME WORKLOAD). */ -}}
{{- define "oriel.metadata" -}}
name: {{ index . 1 }}
namespace: {{ (index . 0).Release.Namespace | toJson }}
labels: {{- include "oriel.labels" (index . 2) | nindent 2 }}
{{- end }}

{{- /* Labels of a unit's pods; from (list ROOT WORKLOAD). */ -}}
{{- define "oriel.podLabels" -}}
{{ include "oriel.labels" (index . 1) }}
{{- with (index . 0).Values.infrastructure.workload_identity.pod_labels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* The specification that all pods begin with; from (list ROOT USER), the number of the user. */ -}}
{{- define "oriel.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with (index . 0).Values.images.pull_secret }}
imagePullSecrets: [{ name: {{ toJson . }} }]
{{- end }}
{{- $user := index . 1 }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ $user }}
  runAsGroup: {{ $user }}
  fsGroup: {{ $user }}
  seccompProfile: { type: RuntimeDefault }
{{- end }}

{{- /* Image of a unit by its tag and, if one is given, its digest, which then decides; from (list ROOT UNIT), such as
inference-cpu. */ -}}
{{- define "oriel.image" -}}
{{- $parts := splitList "-" (index . 1) }}
{{- $digest := get (index . 0).Values.images.digests (index . 1) }}
{{- with (index . 0).Values.images -}}
{{ .registry }}/oriel-{{ first $parts }}:{{ prepend (rest $parts) .tag | join "-" }}{{ with $digest }}@{{ . }}{{ end }}
{{- end }}
{{- end }}

{{- define "oriel.containerSecurity" -}}
{ allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: { drop: [ALL] } }
{{- end }}

{{- /* Everything of ours may be moved: cluster autoscalers keep a node for a pod that has an emptyDir, unless it says so. */ -}}
{{- define "oriel.movable" -}}
{ cluster-autoscaler.kubernetes.io/safe-to-evict: "true" }
{{- end }}

{{- /* The same, for pods that read texts of Secrets once, at their start: another text replaces the pods; from those texts. */ -}}
{{- define "oriel.movableWithSecrets" -}}
{ cluster-autoscaler.kubernetes.io/safe-to-evict: "true", oriel.dev/secrets: {{ toJson . | sha256sum }} }
{{- end }}

{{- /* The Deployment's budget and how it is counted; from (list ROOT WORKLOAD MAXIMUM). */ -}}
{{- define "oriel.disruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {{- include "oriel.metadata" (list (index . 0) (index . 1) (index . 1)) | nindent 2 }}
spec:
  maxUnavailable: {{ index . 2 }}
  selector:
    matchLabels: {{- include "oriel.selector" (index . 1) | nindent 6 }}
  unhealthyPodEvictionPolicy: AlwaysAllow
{{- end }}

{{- /* Same wherever a unit runs: nothing but these two folders can be written. The usage ledger keeps up to 1 GiB in
/var/lib/oriel; a pod whose emptyDir overflows is evicted. From the size of that folder. */ -}}
{{- define "oriel.scratchVolumes" -}}
- { name: tmp, emptyDir: { sizeLimit: 512Mi } }
- { name: state, emptyDir: { sizeLimit: {{ . }} } }
{{- end }}

{{- define "oriel.scratchMounts" -}}
- { name: tmp, mountPath: /tmp }
- { name: state, mountPath: /var/lib/oriel }
{{- end }}

{{- /* Requests and limits. No limit on CPUs: a queue that is throttled is late for everybody. From a map with cpu in
cores and memory in GiB. */ -}}
{{- define "oriel.resources" -}}
requests: { cpu: {{ .cpu | toJson | quote }}, memory: {{ include "oriel.memory" .memory }} }
limits: { memory: {{ include "oriel.memory" .memory }} }
{{- end }}

{{- define "oriel.memory" -}}
{{ mulf . 1024 | toJson }}Mi
{{- end }}

{{- /* Environment variable out of a Secret; from (list VARIABLE REFERENCE), with the reference's name and key. */ -}}
{{- define "oriel.secretEnv" -}}
- name: {{ index . 0 }}
  valueFrom: { secretKeyRef: { name: {{ (index . 1).name | toJson }}, key: {{ (index . 1).key | toJson }} } }
{{- end }}

{{- /* Environment of every unit. Kubernetes puts the POD_ variables into the last one, so they stand before it. */ -}}
{{- define "oriel.env" -}}
- { name: ORIEL_STATE, value: /var/lib/oriel }
- { name: XDG_CACHE_HOME, value: /var/lib/oriel/cache }
{{- with .Values.observability.otlp }}
- { name: OTEL_EXPORTER_OTLP_ENDPOINT, value: "http://collector.{{ $.Release.Namespace }}.svc.cluster.local:4318" }
- { name: OTEL_TRACES_SAMPLER_ARG, value: {{ include "oriel.sampleRatio" . | quote }} }
{{- range $name, $path := dict "POD_NAMESPACE" "metadata.namespace" "POD_NAME" "metadata.name" "POD_UID" "metadata.uid" "POD_NODE" "spec.nodeName" }}
- { name: {{ $name }}, valueFrom: { fieldRef: { apiVersion: v1, fieldPath: {{ $path }} } } }
{{- end }}
- name: OTEL_RESOURCE_ATTRIBUTES
  value: k8s.namespace.name=$(POD_NAMESPACE),k8s.pod.name=$(POD_NAME),k8s.pod.uid=$(POD_UID),k8s.node.name=$(POD_NODE)
{{- end }}
{{- end }}

{{- /* Share of the traces that is kept; from observability.otlp. */ -}}
{{- define "oriel.sampleRatio" -}}
{{ ternary 0.01 .sample_ratio (kindIs "invalid" .sample_ratio) | toJson }}
{{- end }}

{{- /* Probes on the port `admin`; from the number of times, 2 s apart, that a start may be looked at. The liveness probe is
slow to act: a busy unit that is killed drops every call it holds. */ -}}
{{- define "oriel.adminProbes" -}}
startupProbe: { httpGet: { path: /health/live, port: admin }, periodSeconds: 2, failureThreshold: {{ . }} }
readinessProbe: { httpGet: { path: /health/ready, port: admin }, periodSeconds: 2, timeoutSeconds: 2, failureThreshold: 2 }
livenessProbe: { httpGet: { path: /health/live, port: admin }, periodSeconds: 10, timeoutSeconds: 5, failureThreshold: 6 }
{{- end }}

{{- /* Arguments of a flow list, each with its comma. */ -}}
{{- define "oriel.args" -}}
{{- range . }}{{ toJson . }}, {{ end }}
{{- end }}

{{- /* Pod addresses, whose x-oriel-* headers (deadline, tier, tenant) count. Which pods can send any is what the network
policies say: only the gateway reaches logic; it alone, or with logic, reaches inference. */ -}}
{{- define "oriel.trustedPeers" -}}
{{- range list "10.0.0.0/8" "172.16.0.0/12" "192.168.0.0/16" "100.64.0.0/10" "fc00::/7" }}
--trusted-peer, {{ quote . }},
{{- end }}
{{- end }}

{{- /* Whether model calls of logic servers go through the gateway, which does not see direct calls, and would let KEDA
stop the pods under them. Renders "true" or nothing. */ -}}
{{- define "oriel.throughGateway" -}}
{{- $given := .Values.logic.through_gateway }}
{{- if ternary .Values.keda.enabled $given (kindIs "invalid" $given) }}true{{ end }}
{{- end }}

{{- /* Reference to the Secret with Redis's password, as JSON; {} if it needs none. */ -}}
{{- define "oriel.redisSecret" -}}
{{- if .Values.infrastructure.redis_url -}}
{{ .Values.infrastructure.redis_auth_secret_ref | default dict | toJson }}
{{- else -}}
{"name": "oriel-keys", "key": "redis"}
{{- end }}
{{- end }}

{{- /* The model groups, each with all that follows from the values. */ -}}
{{- define "oriel.groups" -}}
{{- $fewest := ternary 0 1 (and .Values.keda.enabled .Values.scale_to_zero) }}
{{- $given := .Values.model_groups }}
{{- if kindIs "invalid" $given }}
{{- $gpu := dict "gpu" (dict "accelerator" "gpu") }}
{{- $given = merge (dict "cpu" (dict "accelerator" "cpu")) (ternary $gpu dict .Values.gpu_enabled) }}
{{- end }}
{{- /* The copy of a group on spot machines serves the same models, and is there only while they are asked for. */ -}}
{{- $all := dict }}
{{- range $name, $group := $given }}
{{- $own := set (deepCopy $group) "repository" ($group.repository | default (printf "%s/%s" (trimSuffix "/" $.Values.infrastructure.model_repository_url) $name)) }}
{{- $_ := set $all $name $own }}
{{- with $group.spot }}
{{- $_ := set $all (printf "%s-spot" $name) (merge (dict "of" $name "replicas" (dict "min" 0 "max" .replicas)) (omit $own "models" "replicas")) }}
{{- end }}
{{- end }}
{{- range $name, $group := $all }}
{{- $onGpu := has $group.accelerator (list "gpu" "tensorrt") }}
{{- $replicas := $group.replicas | default dict }}
{{- $cache := $group.cache | default dict }}
{{ $name | quote }}:
  accelerator: {{ $group.accelerator }}
  on_gpu: {{ $onGpu }}
  gpus: {{ $group.gpus | default 1 | toJson }}
  spot: {{ hasKey $group "of" }}
  {{- if and $group.spot (not (hasKey $group "of")) }}
  spot_tiers: {{ $group.spot.tiers | default (list "bronze") | toJson }}
  {{- end }}
  repository: {{ toJson $group.repository }}
  credentials: {{ $group.credentials | toJson }}
  models: {{ $group.models | default list | toJson }}
  replicas: { min: {{ ternary $fewest $replicas.min (kindIs "invalid" $replicas.min) }}, max: {{ $replicas.max | default 4 }}, spare: {{ $replicas.spare | default 0 }} }
  start_s: {{ $group.start_s | default (ternary 300 120 $onGpu) | toJson }}
  # CPUs and memory in GiB for which the default nodes are chosen (terraform/README.md).
  cpu: {{ $group.cpu | default 2 | toJson }}
  memory: {{ $group.memory | default (ternary 12 4 $onGpu) | toJson }}
  cache: { gb: {{ $cache.gb | default 20 | toJson }}, claim: {{ $cache.claim | default false }} }
  load_grace_s: {{ $group.load_grace_s | default 900 | toJson }}
  place_models: {{ $group.place_models | default false }}
  args: {{ $group.args | default list | toJson }}
  {{- with $group.engine }}
  engine:
    kind: {{ .kind }}
    image: {{ .image | quote }}
    command: {{ toJson .command }}
    services: {{ .services | default (list "chat.completions" "completions") | toJson }}
    health: {{ .health | default "/health" | quote }}
  {{- end }}
{{- end }}
{{- end }}

{{- /* What is scaled by the gateway's queue with KEDA, by CPU without: workload -> its bounds. */ -}}
{{- define "oriel.scaled" -}}
{{- $min := .Values.logic.replicas.min }}
logic:
  min: {{ ternary (ternary 0 2 (and .Values.keda.enabled .Values.scale_to_zero)) $min (kindIs "invalid" $min) }}
  max: {{ .Values.logic.replicas.max }}
  spare: {{ .Values.logic.replicas.spare | default 0 }}
  cpu_percent: 70
  settle_s: 360
  # A node, if there has to be another one, and the image.
  start_s: 120
  capacity: {{ .Values.logic.workers }}
{{- range $name, $group := include "oriel.groups" . | fromYaml }}
inference-{{ $name }}:
  min: {{ $group.replicas.min }}
  max: {{ $group.replicas.max }}
  spare: {{ $group.replicas.spare }}
  # Queues grow long before a model server's CPUs are all busy, above all one with a GPU, which no HorizontalPodAutoscaler
  # sees without an adapter for its metrics.
  cpu_percent: {{ ternary 50 70 $group.on_gpu }}
  # A pod that was slow to start is not dropped for a short lull; one that is dear to keep, sooner. 3600: Kubernetes' most.
  settle_s: {{ min 3600 (max 60 (mul (ternary 2 3 $group.on_gpu) $group.start_s)) }}
  start_s: {{ toJson $group.start_s }}
  capacity: 1
{{- end }}
{{- end }}

{{- /* Whether the collector chooses among whole traces: it gets the spans of all requests and holds them until it has
decided. Renders "true" or nothing. */ -}}
{{- define "oriel.collectorTail" -}}
{{- with .Values.observability.otlp }}{{ if eq (.trace_tail | default "gateway") "collector" }}true{{ end }}{{ end }}
{{- end }}
