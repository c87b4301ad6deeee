"""One file per method, ablations beside it; importing this package registers them all."""

from potluck.methods.cofed import CoFED
from potluck.methods.creamfl import CreamFL
from potluck.methods.creamfl_variants import CreamFLVariants
from potluck.methods.fccl import FCCL
from potluck.methods.fd import FD
from potluck.methods.fed_et import FedET
from potluck.methods.fedallrep import FedAllRep
from potluck.methods.fedapen import FedAPEN
from potluck.methods.fedavg import FedAvg
from potluck.methods.fedavg_variants import FedAvgVariants
from potluck.methods.feddf import FedDF
from potluck.methods.fedgen import FedGen
from potluck.methods.fedgh import FedGH
from potluck.methods.fedhe import FedHe
from potluck.methods.fedhenn import FedHeNN
from potluck.methods.fedin import FedIN
from potluck.methods.fedin_variants import FedINVariants
from potluck.methods.fedkd import FedKD
from potluck.methods.fedl2g import FedL2G
from potluck.methods.fedmd import FedMD
from potluck.methods.fedmrl import FedMRL
from potluck.methods.fedmrl_variants import FedMRLVariants
from potluck.methods.fedmuscle import FedMuscle
from potluck.methods.fedmuscle_variants import FedMuscleVariants
from potluck.methods.fednova import FedNova
from potluck.methods.fedproto import FedProto
from potluck.methods.fedprox import FedProx
from potluck.methods.fedre import FedRE
from potluck.methods.fedrolex import FedRolex
from potluck.methods.fedtgp import FedTGP
from potluck.methods.fjord import FjORD
from potluck.methods.fml import FML
from potluck.methods.gramian import Gramian
from potluck.methods.heterofl import HeteroFL
from potluck.methods.inclusivefl import InclusiveFL
from potluck.methods.inco import InCo
from potluck.methods.lg_fedavg import LGFedAvg
from potluck.methods.local import Local
from potluck.methods.moon import Moon
from potluck.methods.pairwise import Pairwise
from potluck.methods.rhfl import RHFL
from potluck.methods.scaffold import Scaffold
from potluck.methods.scalefl import ScaleFL
from potluck.methods.simclr import SimCLR

__all__ = [
    "FCCL",
    "FD",
    "FML",
    "RHFL",
    "CoFED",
    "CreamFL",
    "CreamFLVariants",
    "FedAPEN",
    "FedAllRep",
    "FedAvg",
    "FedAvgVariants",
    "FedDF",
    "FedET",
    "FedGH",
    "FedGen",
    "FedHe",
    "FedHeNN",
    "FedIN",
    "FedINVariants",
    "FedKD",
    "FedL2G",
    "FedMD",
    "FedMRL",
    "FedMRLVariants",
    "FedMuscle",
    "FedMuscleVariants",
    "FedNova",
    "FedProto",
    "FedProx",
    "FedRE",
    "FedRolex",
    "FedTGP",
    "FjORD",
    "Gramian",
    "HeteroFL",
    "InCo",
    "InclusiveFL",
    "LGFedAvg",
    "Local",
    "Moon",
    "Pairwise",
    "Scaffold",
    "ScaleFL",
    "SimCLR",
]
