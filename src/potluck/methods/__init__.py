"""One file per method, ablations beside it; importing this package registers them all."""

from potluck.methods.cofed import CoFED
from potluck.methods.creamfl import CreamFL
from potluck.methods.creamfl_variants import CreamFLVariants
from potluck.methods.fd import FD
from potluck.methods.fedallrep import FedAllRep
from potluck.methods.fedavg import FedAvg
from potluck.methods.feddf import FedDF
from potluck.methods.fedgh import FedGH
from potluck.methods.fedhe import FedHe
from potluck.methods.fedhenn import FedHeNN
from potluck.methods.fedin import FedIN
from potluck.methods.fedin_variants import FedINVariants
from potluck.methods.fedmd import FedMD
from potluck.methods.fedmrl import FedMRL
from potluck.methods.fedmrl_variants import FedMRLVariants
from potluck.methods.fedmuscle import FedMuscle
from potluck.methods.fedmuscle_variants import FedMuscleVariants
from potluck.methods.fedproto import FedProto
from potluck.methods.fedprox import FedProx
from potluck.methods.fedre import FedRE
from potluck.methods.fedtgp import FedTGP
from potluck.methods.local import Local
from potluck.methods.scaffold import Scaffold
from potluck.methods.simclr import SimCLR

__all__ = [
    "FD",
    "CoFED",
    "CreamFL",
    "CreamFLVariants",
    "FedAllRep",
    "FedAvg",
    "FedDF",
    "FedGH",
    "FedHe",
    "FedHeNN",
    "FedIN",
    "FedINVariants",
    "FedMD",
    "FedMRL",
    "FedMRLVariants",
    "FedMuscle",
    "FedMuscleVariants",
    "FedProto",
    "FedProx",
    "FedRE",
    "FedTGP",
    "Local",
    "Scaffold",
    "SimCLR",
]
