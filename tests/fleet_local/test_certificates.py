"""Certificates and kubeconfigs of a cluster, read with the libraries that will use them."""

from __future__ import annotations

import base64
import http.client
import http.server
import json
import ssl
import stat
import threading
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import NameOID

from fleet_local.api import AdminApi
from fleet_local.pki import USERS, kubeconfig, make_certificates


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("state") / "pki"
    make_certificates(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "common_name", "group"),
    [
        ("kubelet", "system:node:node-0", "system:nodes"),
        ("admin", "admin", "system:masters"),
        ("scheduler", "system:kube-scheduler", None),
        ("controller-manager", "system:kube-controller-manager", None),
        ("proxy", "system:kube-proxy", None),
    ],
)
def test_components_carry_the_names_that_kubernetes_gives_rights_to(pki: Path, name: str, common_name: str, group: str | None) -> None:
    subject = x509.load_pem_x509_certificate((pki / f"{name}.crt").read_bytes()).subject
    assert [a.value for a in subject.get_attributes_for_oid(NameOID.COMMON_NAME)] == [common_name]
    assert [a.value for a in subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)] == ([group] if group else [])


def test_every_certificate_is_signed_by_the_one_authority(pki: Path) -> None:
    authority = x509.load_pem_x509_certificate((pki / "ca.crt").read_bytes())
    certificates = sorted(pki.glob("*.crt"))
    assert len(certificates) > 5
    for path in certificates:
        x509.load_pem_x509_certificate(path.read_bytes()).verify_directly_issued_by(authority)


def test_keys_are_readable_by_their_owner_only(pki: Path) -> None:
    assert stat.S_IMODE(pki.stat().st_mode) == 0o700
    assert {stat.S_IMODE(p.stat().st_mode) for p in pki.glob("*.key")} == {0o600}


def test_a_folder_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / ".pki.new").mkdir()
    (tmp_path / ".pki.new" / "half").touch()  # of a run that was killed
    make_certificates(tmp_path / "pki")
    assert not (tmp_path / ".pki.new").exists() and not (tmp_path / "pki" / "half").exists()


@pytest.mark.parametrize("user", USERS)
def test_a_kubeconfig_needs_no_other_file(pki: Path, user: str) -> None:
    document = json.loads(kubeconfig(pki, user, "https://127.0.0.1:1"))
    [entry] = document["users"]
    assert base64.b64decode(entry["user"]["client-key-data"]) == (pki / f"{user}.key").read_bytes()
    assert document["clusters"][0]["cluster"]["server"] == "https://127.0.0.1:1"
    assert document["current-context"] == document["contexts"][0]["name"]


def get_without_certificate(authority: Path, port: int) -> bytes:
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=ssl.create_default_context(cafile=str(authority)), timeout=60)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().read()
    finally:
        connection.close()


def test_server_and_client_trust_one_another_on_loopback(pki: Path) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/readyz" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pki / "apiserver.crt", pki / "apiserver.key")
    context.load_verify_locations(pki / "ca.crt")
    context.verify_mode = ssl.CERT_REQUIRED
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        api = AdminApi(pki, server.server_port)
        assert api.ready()
        assert api.object("/nothing") is None
        with pytest.raises((OSError, http.client.HTTPException)):
            get_without_certificate(pki / "ca.crt", server.server_port)
        server.shutdown()
    assert AdminApi(pki, server.server_port).get("/readyz") == (0, b"")
