"""Debian's nginx on loopback, in front of something, as an Ingress controller runs it; for as long as a test takes."""

import contextlib
import os
import shutil
import socket
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

CONFIG = """
daemon off;
pid {folder}/pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port};
        {locations}
    }}
}}
"""
PASS = "proxy_pass http://{back}; proxy_set_header Host $http_host; proxy_buffering off;"
PLAIN = "location / {{ " + PASS + " }}"
LOGGED_IN = (
    """
        location = /_auth {{
            internal;
            proxy_pass {asked};
            proxy_pass_request_body off;
            proxy_set_header Content-Length "";
            proxy_set_header Authorization "";
        }}
        location / {{
            auth_request /_auth;
            auth_request_set $token $upstream_http_authorization;
            proxy_set_header Authorization $token;
            error_page 401 = @login;
            """
    + PASS
    + """
        }}
        location @login {{ return 302 {login}; }}
"""
)
"""What the controller ingress-nginx makes of the annotations auth-url, auth-signin and auth-response-headers."""
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"


@contextlib.contextmanager
def nginx(folder, back, asked="", login=""):
    """Its address.

    Args:
        back: HOST:PORT of what it stands in front of.
        asked: Address at which it asks about each request; "" lets all of them through.
        login: Where it sends people who are not logged in.
    """
    if (program := shutil.which("nginx", path=PATH)) is None:
        pytest.skip("nginx is not installed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    locations = (LOGGED_IN if asked else PLAIN).format(back=back, asked=asked, login=login)
    (folder / "nginx.conf").write_text(CONFIG.format(folder=folder, port=port, locations=locations), encoding="utf-8")
    command = [program, "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(folder / "nginx.conf")]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 30.0
            while not is_open(port):
                assert process.poll() is None, (folder / "error.log").read_text(encoding="utf-8")
                assert time.monotonic() < deadline, "nginx did not start within 30 s"
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(20.0)


def is_open(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
    return False


class _Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        is_known = self.server.cookie in self.headers.get("Cookie", "")
        self.send_response(202 if is_known else 401)
        if is_known:
            self.send_header("Authorization", self.server.header)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def oidc_proxy(cookie, header):
    """Answers as oauth2-proxy at /oauth2/auth: 401, or 202 with the header of its injectResponseHeaders; its address.

    Args:
        cookie: Of people who are logged in.
    """
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        server.cookie, server.header = cookie, header
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/oauth2/auth"
        finally:
            server.shutdown()
