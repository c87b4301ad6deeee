"""One file per method; importing this package registers them all."""

from potluck.methods.fedallrep import FedAllRep
from potluck.methods.fedavg import FedAvg
from potluck.methods.fedgh import FedGH
from potluck.methods.fedin import FedIN
from potluck.methods.fedmrl import FedMRL
from potluck.methods.fedproto import FedProto
from potluck.methods.fedprox import FedProx
from potluck.methods.fedre import FedRE
from potluck.methods.local import Local
from potluck.methods.scaffold import Scaffold

__all__ = [
    "FedAllRep",
    "FedAvg",
    "FedGH",
    "FedIN",
    "FedMRL",
    "FedProto",
    "FedProx",
    "FedRE",
    "Local",
    "Scaffold",
]
