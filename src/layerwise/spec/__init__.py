"""What is planned for: the cluster and the model, as frozen, validated records read from YAML.

    records     Record, and reading records from YAML files, presets and mappings
    attention   the kinds of layers, and AttentionSpec: heads and mask of one kind
    model       ModelSpec: a decoder as the planner sees it
    cluster     ClusterSpec: the machine as the planner sees it

Units stand in the names. Torch is never imported here, so `layerwise plan` starts in milliseconds.
"""

from layerwise.spec.attention import CHUNKED, FULL, LINEAR, SLIDING, AttentionSpec, LayerKind, Mixer
from layerwise.spec.cluster import MAX_OVERLAP_PARTS, ClusterSpec, EfficiencyTable, load_cluster
from layerwise.spec.model import ModelSpec, load_model
from layerwise.spec.records import Record, preset_names, read_settings, read_yaml, record_from

__all__ = [
    "CHUNKED",
    "FULL",
    "LINEAR",
    "MAX_OVERLAP_PARTS",
    "SLIDING",
    "AttentionSpec",
    "ClusterSpec",
    "EfficiencyTable",
    "LayerKind",
    "Mixer",
    "ModelSpec",
    "Record",
    "load_cluster",
    "load_model",
    "preset_names",
    "read_settings",
    "read_yaml",
    "record_from",
]
