"""HTTP requests for tests of nodes' pages, of the dashboard and of browsers."""

import contextlib
import http.client
import urllib.parse

from netkit import DEADLINE


def ask(at, path, method="GET", headers=(), body=None):
    """Send one request to a URL, or to an object with a `url`; return (status, headers, body)."""
    place = urllib.parse.urlsplit(getattr(at, "url", at)).netloc
    with contextlib.closing(http.client.HTTPConnection(place, timeout=DEADLINE)) as connection:
        connection.request(method, "/" + path.removeprefix("/"), body, dict(headers))
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
