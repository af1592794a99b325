"""Headers of a page that may load nothing but itself (Content-Security-Policy)."""

from __future__ import annotations


def page_headers(script: str = "'self'", style: str = "'self'") -> dict[str, str]:
    """`script` and `style` say where those may come from: a hash, or this server's own files."""
    policy = (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
