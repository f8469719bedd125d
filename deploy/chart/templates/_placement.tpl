{{- /*
Placement: GPU nodes have CPUs to spare, and they are paid for.

A node with one GPU comes with 8 CPUs and more; the pod on the GPU uses some of them. CPU pods (logic servers, CPU
inference) use the rest. What has to hold, and by what:

1. A CPU pod runs on a GPU node that a GPU pod already pays for. It tolerates the taint and prefers these nodes.
2. It never makes anybody buy one, and never moves to an empty one. A preference alone would not do: when no node has
   room, an autoscaler asks of each kind of node whether a new one would take the pod, and a pod that tolerates the taint
   fits. So it also has to be where a pod with the label oriel.dev/cpu-here is (required podAffinity, by host). Two kinds
   of pods carry it: GPU inference, and `anchor`, a DaemonSet that does nothing on every node without a GPU. A new CPU
   node comes with its anchor (autoscalers count DaemonSets when they imagine a node): the pod fits. A new GPU node comes
   with nothing: it does not fit, until a GPU pod is there. CPU pods themselves do not carry the label: the exception
   "the first pod of a group may go anywhere" is for pods that match their own affinity.
3. It never hurts a GPU pod. A GPU pod that finds no CPUs or memory displaces CPU pods (PriorityClass oriel-gpu above
   oriel-cpu; they spill to CPU nodes). While both run, CPU time is shared by requests, and each pod's memory has a limit
   equal to its request, so that none can drive the node into eviction. Model caches are counted as ephemeral storage.
4. It keeps no node from going. All pods may be evicted (PodDisruptionBudgets allow one at least, emptyDirs are marked
   as no obstacle), and autoscalers judge GPU nodes by their GPUs alone. What affinity cannot do: it is looked at when a
   pod is placed, so CPU pods stay when the GPU pod beside them ends. An autoscaler then removes the node only if these
   pods fit on nodes that exist; while every CPU node is full they hold it. If that costs more than it saves, set
   placement.share_gpu_nodes = false: then none of all this is made, and CPU pods keep to CPU nodes.

Where clouds differ. The taint is nvidia.com/gpu=present:NoSchedule on all three:
  GKE   sets it by itself on a pool with GPUs, and adds a toleration to every pod that asks for nvidia.com/gpu. Not to
        CPU pods: theirs stands here.
  EKS   sets no taint: the node group does, as `taint` (effects are spelled NO_SCHEDULE there). When a group is at zero, its
        autoscaler learns labels and taints from the group's tags, which the root sets: without them it would imagine an
        untainted node without a label and be wrong about both kinds of pods.
  AKS   sets no taint for GPUs either: the pool does (`node_taints`). It adds one of its own to spot pools only.
Their autoscalers are all the Kubernetes cluster-autoscaler. Karpenter (also as EKS Auto Mode and AKS node
auto-provisioning) does not satisfy an affinity to pods of a DaemonSet when it imagines a node: there CPU pods would
wait for ever. Use node groups, or share_gpu_nodes = false.
*/ -}}

{{- /* Whether there are GPU nodes to share. Renders "true" or nothing. */ -}}
{{- define "oriel.sharesGpuNodes" -}}
{{- if and .Values.placement.share_gpu_nodes .Values.gpu_enabled }}true{{ end }}
{{- end }}

{{- define "oriel.gpuToleration" -}}
{{ merge (dict "operator" "Equal") .Values.infrastructure.gpu_taint | toJson }}
{{- end }}

{{- /* The taint of spot pools, and the one that AKS adds. */ -}}
{{- define "oriel.spotTolerations" -}}
{{- range list "oriel.dev/spot" "kubernetes.azure.com/scalesetpriority" }}{ key: {{ . }}, operator: Exists, effect: NoSchedule }, {{ end }}
{{- end }}

{{- /* Gateways, Redis and the collector. Not on GPU nodes, whose taint they do not tolerate: the public door has to outlive
the last GPU. On full nodes gateways displace logic servers and CPU inference, not the other way round. */ -}}
{{- define "oriel.gatewayPlacement" -}}
priorityClassName: oriel-gateway
affinity:
  nodeAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - { weight: 50, preference: { matchExpressions: [{ key: oriel.dev/pool, operator: In, values: [system] }] } }
{{- end }}

{{- /* From (list ROOT SPOT). */ -}}
{{- define "oriel.gpuPlacement" -}}
nodeSelector: {{- merge (ternary (dict "oriel.dev/spot" "true") dict (index . 1)) (index . 0).Values.infrastructure.gpu_node_selector | toYaml | nindent 2 }}
tolerations: [{{ if index . 1 }}{{ include "oriel.spotTolerations" . }}{{ end }}{{ include "oriel.gpuToleration" (index . 0) }}]
{{- if include "oriel.sharesGpuNodes" (index . 0) }}
priorityClassName: oriel-gpu
{{- end }}
{{- end }}

{{- /* From (list ROOT SPOT). */ -}}
{{- define "oriel.cpuPlacement" -}}
{{- $spot := index . 1 }}
{{- with index . 0 }}
{{- $shares := include "oriel.sharesGpuNodes" . }}
{{- if $spot }}
nodeSelector: { oriel.dev/spot: "true" }
{{- end }}
{{- if or $spot $shares }}
tolerations: [{{ if $spot }}{{ include "oriel.spotTolerations" . }}{{ end }}{{ if $shares }}{{ include "oriel.gpuToleration" . }}{{ end }}]
{{- end }}
affinity:
  nodeAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      {{- if and $shares .Values.infrastructure.gpu_node_selector }}
      - weight: 100
        preference:
          matchExpressions:
            {{- range $key, $value := .Values.infrastructure.gpu_node_selector }}
            - { key: {{ toJson $key }}, operator: In, values: [{{ toJson $value }}] }
            {{- end }}
      {{- end }}
      - { weight: 50, preference: { matchExpressions: [{ key: oriel.dev/pool, operator: In, values: [cpu] }] } }
{{- if $shares }}
  podAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      - { topologyKey: kubernetes.io/hostname, labelSelector: { matchLabels: { oriel.dev/cpu-here: "true" } } }
priorityClassName: oriel-cpu
{{- end }}
{{- end }}
{{- end }}

{{- /* Over zones and nodes as evenly as it goes, each version of a Deployment for itself. A single node that goes may not
take every gateway with it, so for them this is no wish: where there are two nodes they are on both, and their priority
makes the room. On a cluster of one node they share it. From a workload. */ -}}
{{- define "oriel.spread" -}}
{{- $workload := . }}
{{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
- maxSkew: 1
  topologyKey: {{ . }}
  whenUnsatisfiable: {{ ternary "DoNotSchedule" "ScheduleAnyway" (and (eq $workload "gateway") (hasPrefix "kubernetes" .)) }}
  labelSelector:
    matchLabels: {{- include "oriel.selector" $workload | nindent 6 }}
  matchLabelKeys: [pod-template-hash]
  nodeAffinityPolicy: Honor
  nodeTaintsPolicy: Honor
{{- end }}
{{- end }}
