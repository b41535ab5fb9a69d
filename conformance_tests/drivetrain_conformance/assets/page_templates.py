"""Render the pages that are made from reports."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined


def rendered(template: str, **values: object) -> str:
    """Return a template of this package, filled in; a value that is missing raises."""
    environment = Environment(
        loader=PackageLoader("drivetrain_conformance", "templates"),
        autoescape=template.endswith(".svg.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(**values)
