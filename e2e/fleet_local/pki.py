"""Certificates of a cluster: one authority, one certificate for each component, and kubeconfigs made of them.

Common names and groups are those Kubernetes gives to its components (kubernetes.io, "PKI certificates and requirements").
"""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fleet_local.namespaces import NODE_IP

NODE_NAME: Final = "node-0"
API_SERVICE_IP: Final = "10.96.0.1"
USERS: Final = ("admin", "controller-manager", "scheduler", "proxy", "kubelet", "coredns")
_SERVERS: Final = (
    *("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local", NODE_NAME),
    *("127.0.0.1", NODE_IP, API_SERVICE_IP),
)
# file, common name, group, also a server
_CERTIFICATES: Final[tuple[tuple[str, str, str | None, bool], ...]] = (
    ("apiserver", "kube-apiserver", None, True),
    ("apiserver-kubelet", "kube-apiserver-kubelet-client", "system:masters", False),
    ("kubelet", f"system:node:{NODE_NAME}", "system:nodes", True),
    ("admin", "admin", "system:masters", False),
    ("controller-manager", "system:kube-controller-manager", None, False),
    ("scheduler", "system:kube-scheduler", None, False),
    ("proxy", "system:kube-proxy", None, False),
    ("coredns", "radixfleet:coredns", "system:masters", False),
)


def make_certificates(folder: Path) -> None:
    """Writes all keys and certificates; the folder appears complete or not at all."""
    temporary = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True, mode=0o700)
    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "radixfleet-local")])
    _write_certificate(temporary / "ca.crt", authority, authority_key.public_key(), authority, authority_key, ())
    for name, common_name, group, is_server in _CERTIFICATES:
        key = ec.generate_private_key(ec.SECP256R1())
        attributes = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
        if group:
            attributes.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, group))
        _write_key(temporary / f"{name}.key", key)
        sans = _SERVERS if is_server else ()
        _write_certificate(temporary / f"{name}.crt", x509.Name(attributes), key.public_key(), authority, authority_key, sans)
    accounts = ec.generate_private_key(ec.SECP256R1())
    _write_key(temporary / "sa.key", accounts)
    public = serialization.PublicFormat.SubjectPublicKeyInfo
    (temporary / "sa.pub").write_bytes(accounts.public_key().public_bytes(serialization.Encoding.PEM, public))
    temporary.rename(folder)


def _write_certificate(
    path: Path, subject: x509.Name, public: ec.EllipticCurvePublicKey, issuer: x509.Name, issuer_key: ec.EllipticCurvePrivateKey, sans: Sequence[str]
) -> None:
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=3650))
        .add_extension(x509.BasicConstraints(ca=subject == issuer, path_length=None), critical=True)
    )
    if sans:
        builder = builder.add_extension(x509.SubjectAlternativeName([_san(s) for s in sans]), critical=False)
    path.write_bytes(builder.sign(issuer_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))


def _san(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption())
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as f:
        f.write(pem)


def kubeconfig(pki: Path, user: str, server: str) -> str:
    """A kubeconfig that needs no other file."""

    def data(name: str) -> str:
        return base64.b64encode((pki / name).read_bytes()).decode()

    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "radixfleet-local",
            "clusters": [{"name": "radixfleet-local", "cluster": {"server": server, "certificate-authority-data": data("ca.crt")}}],
            "users": [{"name": user, "user": {"client-certificate-data": data(f"{user}.crt"), "client-key-data": data(f"{user}.key")}}],
            "contexts": [{"name": "radixfleet-local", "context": {"cluster": "radixfleet-local", "user": user}}],
        },
        indent=1,
    )
