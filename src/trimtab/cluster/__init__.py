"""The hardware of a job: hosts, devices, links, and what was measured on them."""

from trimtab.cluster.cluster import SCHEMA_VERSION, Cluster, Device, Host, Link, Rank, model_name, parse_rate
from trimtab.cluster.file import cluster_tree, load_cluster, parse_cluster, save_cluster
from trimtab.cluster.profile import Profile, check_profile, merge_profiles

__all__ = [
    "SCHEMA_VERSION",
    "Cluster",
    "Device",
    "Host",
    "Link",
    "Profile",
    "Rank",
    "check_profile",
    "cluster_tree",
    "load_cluster",
    "merge_profiles",
    "model_name",
    "parse_cluster",
    "parse_rate",
    "save_cluster",
]
