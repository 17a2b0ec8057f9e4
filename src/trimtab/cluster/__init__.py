"""What the hardware can do."""

from trimtab.cluster.cluster import SCHEMA_VERSION, Cluster, Device, Host, Link, Rank
from trimtab.cluster.file import load_cluster, parse_cluster, save_cluster

__all__ = [
    "SCHEMA_VERSION",
    "Cluster",
    "Device",
    "Host",
    "Link",
    "Rank",
    "load_cluster",
    "parse_cluster",
    "save_cluster",
]
