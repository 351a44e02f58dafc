"""The API against its own OpenAPI document: every answer, also to nonsense, matches its description."""

import http

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from memoire.nodes.http import NodePages
from pageskit import three_actors, watch

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")

requests = pytest.importorskip("requests", reason="schemathesis brings it")
not_a_server_error = pytest.importorskip("schemathesis.checks").not_a_server_error
negative_data_rejection = pytest.importorskip("schemathesis.specs.openapi.checks").negative_data_rejection

pytestmark = [
    # On a busy machine, a dashboard may end before it has closed the connections of thousands of requests.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

EXAMPLES = 15
MAX_REQUEST = 16 << 10
"""Most bytes of a request's line and headers that the dashboard's server accepts."""


@pytest.fixture(scope="module")
def described(shared_cluster):
    """The API's OpenAPI document, from a dashboard of a server with data."""
    server = shared_cluster.server(name="home", run="r-1")
    three_actors(shared_cluster, server, "")
    with NodePages("127.0.0.1:0", server) as pages, watch(pages, steps=120) as board:
        yield schemathesis.openapi.from_url(f"{board.url}/api/openapi.json")


ENDLESS = "/api/stream"


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.value)
def test_every_answer_is_as_it_is_described(described, mode):
    tried = []
    for result in described.get_all_operations():
        operation = result.ok()
        if operation.path == ENDLESS:
            continue
        if mode.is_negative and not list(operation.iter_parameters()) and not operation.body:
            continue  # an operation without input has no wrong value

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            phases=[Phase.generate],  # shrinking an example takes minutes
            suppress_health_check=list(HealthCheck),
        )
        def ask(case):
            try:
                answer = case.call(timeout=100.0)
            except requests.exceptions.RequestException:
                # After a request that is too large, the server may hang up before the client reads the refusal.
                if len(case.as_curl_command()) < MAX_REQUEST:
                    raise
                return
            # A busy node may answer late; a late answer is no fault of the API.
            excused = [not_a_server_error] if answer.status_code == http.HTTPStatus.BAD_GATEWAY else []
            if answer.status_code == http.HTTPStatus.REQUEST_ENTITY_TOO_LARGE:  # a refusal in spite of other errors
                excused = [negative_data_rejection]
            case.validate_response(answer, excluded_checks=excused)

        ask()
        tried.append(operation.path)
    assert len(tried) >= 12
