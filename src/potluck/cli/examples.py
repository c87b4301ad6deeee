"""Examples at the end of every `--help`."""

from __future__ import annotations

FIRST = (
    "potluck demo",
    "potluck run digits.yaml training.rounds=5",
    "potluck compare digits.yaml --methods fedproto,fedmrl --seeds 0,1,2",
    "potluck compare --help",
)
EXAMPLES = {
    "demo": ("potluck demo", "potluck demo --out runs/first"),
    "new": ("potluck new method my-method", "potluck new method FedMine --folder methods"),
    "doctor": ("potluck doctor",),
    "run": (
        "potluck run digits.yaml",
        "potluck run digits.yaml method=fedproto training.rounds=5 --out runs/proto",
    ),
    "resume": ("potluck resume runs/digits", "potluck resume runs/digits --rounds 50 engine.device=cpu"),
    "compare": (
        "potluck compare digits.yaml --methods fedproto,fedmrl --seeds 0,1,2",
        "potluck compare digits.yaml --methods fedmrl --rounds 5,10 --latex table.tex",
        "potluck compare digits.yaml --methods fedavg,mine --plugin mine.py",
    ),
    "watch": ("potluck watch runs/digits", "potluck watch runs --page 8080"),
    "methods": ("potluck methods", "potluck methods --plugin my_method.py"),
    "explain": (
        "potluck explain fedmrl",
        "potluck explain fedmrl digits.yaml method.d1=16",
        "potluck explain fedmrl --options",
    ),
    "split": ("potluck split digits.yaml", "potluck split digits.yaml partition.alpha=0.1 --png split.png"),
    "plot": (
        "potluck plot",
        "potluck plot curves runs/digits --out curves.pdf",
        "potluck plot option runs/widths --over d1",
    ),
    "report": ("potluck report runs/digits", "potluck report runs/digits-compare"),
    "serve": (
        "potluck serve digits.yaml --out runs/hospitals",
        "potluck serve digits.yaml --address 0.0.0.0:8000 --ca ca.crt --certificate server.pem --key server.key",
    ),
    "join": (
        "potluck join --client 0 --model mine.py:model --data mine.py:data --check digits.yaml",
        "potluck join --client 0 --model mine.py:model --data mine.py:data --server localhost:8000",
    ),
    "gate": ("potluck gate --listen 0.0.0.0:8443 --ca ca.crt --certificate server.pem --key server.key",),
    "status": ("potluck status runs/hospitals", "potluck status sites/0 --json"),
    "keys": ("potluck keys keys --server server.example.org --clients a,b,c",),
    "prune": ("potluck prune sites/0 --keep 3",),
}


def epilog(lines: tuple[str, ...]) -> str:
    """Examples as typer shows them: a paragraph gives a line."""
    return "\n\n".join(["Examples:" if len(lines) > 1 else "Example:", *(f"$ {line}" for line in lines)])


def flowing(text: str) -> str:
    """A docstring whose paragraphs are one line each, so that they break where the terminal ends."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))
