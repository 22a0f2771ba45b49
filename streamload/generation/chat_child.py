"""The process in which a chat template runs, in Jinja's sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NoReturn

from streamload.generation.child import allow_memory, answering

# Older sandboxes are known to let code out.
_LEAST_JINJA = (3, 1, 6)


def serve() -> None:
    """Fill in templates."""
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """``{% generation %}`` marks what training counts as the answer; here it is just text."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def answer(request: Mapping[str, Any]) -> str:
        found = tuple(int(n) for n in jinja2.__version__.split(".")[:3] if n.isdigit())
        if found < _LEAST_JINJA:
            raise ValueError(f"jinja2 {jinja2.__version__} is too old, it must be 3.1.6 or later")
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda style: datetime.datetime.now().strftime(style)
        template = environment.from_string("")  # all that is imported late is imported now
        template.render()
        _shut_in(request["built_bytes"])
        return str(environment.from_string(request["template"]).render(**request["variables"]))

    answering(answer)


def _shut_in(nbytes: int) -> None:
    """Nothing more is opened, written or started by this process (Linux, macOS)."""
    allow_memory(nbytes)
    with suppress(ImportError, OSError, ValueError, AttributeError):
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))


def _to_json(value: object, **options: Any) -> str:
    """As transformers has it: Jinja's own filter escapes for HTML."""
    known = ("ensure_ascii", "indent", "separators", "sort_keys")
    chosen = {"ensure_ascii": False, **{key: options[key] for key in known if key in options}}
    return json.dumps(value, **chosen)
