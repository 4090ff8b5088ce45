"""The components of a cluster: their configuration files and command lines. Pure: paths and ports in, text out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fleet_local.hostview import PAUSE_IMAGE
from fleet_local.layout import Layout
from fleet_local.namespaces import NODE_IP
from fleet_local.pki import NODE_NAME

POD_CIDR: Final = "10.244.0.0/16"
NODE_POD_CIDR: Final = "10.244.0.0/24"
SERVICE_CIDR: Final = "10.96.0.0/16"
API_PORT: Final = 6443
DNS_READY_PORT: Final = 8181
CONTAINERD_SOCKET: Final = "/run/containerd/containerd.sock"  # in the cluster's mount namespace
CNI_PLUGINS: Final = "/usr/lib/cni"
COMPONENTS: Final = (
    "containerd",
    "etcd",
    "apiserver",
    "controller-manager",
    "scheduler",
    "kubelet",
    "proxy",
    "coredns",
    "forward-api",
    "forward-router",
)

# Watch the API server. After it was started anew their watches back off for up to a minute, so they are started anew with it; pods do not notice.
API_CLIENTS: Final = ("controller-manager", "scheduler", "kubelet", "proxy", "coredns")


@dataclass(frozen=True, slots=True)
class Settings:
    """What the configuration depends on besides the layout."""

    binary: Path
    cgroup_root: str
    snapshotter: str


def containerd_config(layout: Layout, settings: Settings) -> str:
    """containerd's config.toml. Sockets and state lie on the private /run, so no path is too long for a unix socket."""
    conf = layout.config
    return f"""version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
[grpc]
  address = "{CONTAINERD_SOCKET}"
[plugins."io.containerd.internal.v1.opt"]
  path = "/var/lib/containerd/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{CNI_PLUGINS}"
    conf_dir = "{conf}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "{settings.snapshotter}"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      base_runtime_spec = "{conf}/base-spec.json"
"""


def cni_config() -> str:
    """One bridge with host-local addresses; the lists of given addresses lie on the private /var/lib, so they go with the pods."""
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "ipMasq": False,
        "hairpinMode": True,
        "ipam": {"type": "host-local", "ranges": [[{"subnet": NODE_POD_CIDR}]], "routes": [{"dst": "0.0.0.0/0"}]},
    }
    return json.dumps({"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge, {"type": "portmap", "capabilities": {"portMappings": True}}]})


def kubelet_config(layout: Layout, settings: Settings) -> str:
    """KubeletConfiguration (kubelet.config.k8s.io/v1beta1) for cgroup v1 and v2 without systemd, and without eviction by disk."""
    pki = layout.pki
    return json.dumps(
        {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "failCgroupV1": False,
            "failSwapOn": False,
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": settings.cgroup_root,
            "enforceNodeAllocatable": [],
            "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
            "clusterDNS": [NODE_IP],
            "clusterDomain": "cluster.local",
            "authentication": {"anonymous": {"enabled": False}, "webhook": {"enabled": True}, "x509": {"clientCAFile": f"{pki}/ca.crt"}},
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": f"{pki}/kubelet.crt",
            "tlsPrivateKeyFile": f"{pki}/kubelet.key",
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "0%", "imagefs.available": "0%", "nodefs.inodesFree": "0%"},
            "imageGCHighThresholdPercent": 100,
            "resolvConf": "",
            "volumePluginDir": "/var/lib/kubelet/volume-plugins",
            "localStorageCapacityIsolation": False,
            "serializeImagePulls": False,
            "registryPullQPS": 0,
            "maxPods": 110,
            "syncFrequency": "10s",
            "nodeStatusUpdateFrequency": "4s",
            "shutdownGracePeriod": "0s",
        },
        indent=1,
    )


def proxy_config(layout: Layout) -> str:
    """KubeProxyConfiguration: iptables of the cluster's own network namespace; no sysctl of the host."""
    return json.dumps(
        {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "iptables",
            "clusterCIDR": POD_CIDR,
            "hostnameOverride": NODE_NAME,
            "clientConnection": {"kubeconfig": str(layout.inner_kubeconfig("proxy"))},
            "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
            "iptables": {"minSyncPeriod": "100ms", "syncPeriod": "30s"},
        },
        indent=1,
    )


def corefile(layout: Layout) -> str:
    """CoreDNS on the node's address: names of the cluster only, nothing is forwarded."""
    return f"""cluster.local:53 in-addr.arpa:53 {{
    bind {NODE_IP}
    errors
    ready {NODE_IP}:{DNS_READY_PORT}
    kubernetes cluster.local in-addr.arpa {{
        kubeconfig {layout.inner_kubeconfig("coredns")}
        pods verified
        ttl 2
    }}
    cache 2
}}
"""


def command(component: str, layout: Layout, settings: Settings) -> list[str]:
    """The command line of a component, as it runs inside the cluster's namespaces."""
    pki, conf, binary = layout.pki, layout.config, str(settings.binary)
    match component:
        case "containerd":
            return ["containerd", "--config", f"{conf}/containerd.toml"]
        case "etcd":
            urls = ["--listen-client-urls", "http://127.0.0.1:2379", "--advertise-client-urls", "http://127.0.0.1:2379"]
            peers = ["--listen-peer-urls", "http://127.0.0.1:2380", "--log-level", "warn"]
            # Nothing here must survive a power cut, and a test machine's disk is slow to sync.
            return [binary, "etcd", "--data-dir", f"{layout.disk}/etcd", "--unsafe-no-fsync", *urls, *peers]
        case "apiserver":
            return [binary, *_apiserver(pki)]
        case "controller-manager":
            return [
                *(binary, "kube-controller-manager", f"--kubeconfig={layout.inner_kubeconfig('controller-manager')}"),
                *(f"--root-ca-file={pki}/ca.crt", f"--service-account-private-key-file={pki}/sa.key", "--use-service-account-credentials=true"),
                *("--leader-elect=false", f"--cluster-cidr={POD_CIDR}", "--profiling=false", "--kube-api-qps=200", "--kube-api-burst=400"),
            ]
        case "scheduler":
            kubeconfig = f"--kubeconfig={layout.inner_kubeconfig('scheduler')}"
            return [binary, "kube-scheduler", kubeconfig, "--leader-elect=false", "--profiling=false", "--kube-api-qps=200", "--kube-api-burst=400"]
        case "kubelet":
            config = (f"--kubeconfig={layout.inner_kubeconfig('kubelet')}", f"--config={conf}/kubelet.json", "--root-dir=/var/lib/kubelet")
            return [binary, "kubelet", *config, f"--hostname-override={NODE_NAME}", f"--node-ip={NODE_IP}", "--cert-dir=/var/lib/kubelet/pki"]
        case "proxy":
            return [binary, "kube-proxy", f"--config={conf}/proxy.json"]
        case "coredns":
            return [binary, "coredns", "-conf", f"{conf}/Corefile"]
    raise KeyError(component)


def _apiserver(pki: Path) -> Sequence[str]:
    return (
        *("kube-apiserver", "--etcd-servers=http://127.0.0.1:2379", f"--advertise-address={NODE_IP}", "--bind-address=0.0.0.0"),
        *(f"--secure-port={API_PORT}", f"--service-cluster-ip-range={SERVICE_CIDR}", f"--client-ca-file={pki}/ca.crt"),
        *(f"--tls-cert-file={pki}/apiserver.crt", f"--tls-private-key-file={pki}/apiserver.key"),
        *("--service-account-issuer=https://kubernetes.default.svc", f"--service-account-key-file={pki}/sa.pub"),
        *(f"--service-account-signing-key-file={pki}/sa.key", f"--kubelet-certificate-authority={pki}/ca.crt"),
        *(f"--kubelet-client-certificate={pki}/apiserver-kubelet.crt", f"--kubelet-client-key={pki}/apiserver-kubelet.key"),
        *("--authorization-mode=Node,RBAC", "--allow-privileged=true", "--kubelet-preferred-address-types=InternalIP", "--profiling=false"),
        "--storage-media-type=application/vnd.kubernetes.protobuf",
    )
