"""The modules whose mutants must be caught, each with the tests that must catch them."""

from __future__ import annotations

_PARTITION = tuple(
    f"training/test_partition.py::test_{name}"
    for name in (
        "samples_are_scored_in_evaluation_mode",
        "scores_are_squared_gradient_norms",
        "sam_sets_equal_those_of_the_reference_implementation",
        "files_of_other_samples_are_rejected",
        "rule_all_is_sam_and_rule_none_is_sgd_bit_for_bit",
        "samples_can_be_partitioned_repeatedly",
    )
)
_JOINT = ("methods/test_joint_methods.py",)
_STEP = (
    "training/loop/test_step.py", "optim/test_sam.py", "training/loop/test_averaged_weights.py", "laws/test_golden.py",
    "laws/test_executors_agree.py::test_offload_equals_the_loop_bit_for_bit",
)  # fmt: skip
_LOOPS = ("optim/test_sharpness_aware.py", "optim/test_sharpbalance_loop.py")

TESTS: dict[str, tuple[str, ...]] = {
    "core/stats/comparisons.py": ("core/stats/test_comparisons.py",),
    "core/stats/estimates.py": (
        "evaluation/metrics/test_proper_scores.py", "evaluation/metrics/test_disagreement.py",
        "core/stats/test_intervals.py",
    ),
    "core/stats/intervals.py": ("core/stats/test_intervals.py",),
    "core/stats/ranking.py": ("core/stats/test_ranking.py",),
    "core/tensor_tree.py": ("core/test_tensor_tree.py",),
    "data/partition/masks.py": ("data/partition/test_masks.py",),
    "data/partition/rules.py": ("data/partition/test_rules.py",),
    "data/partition/topk.py": ("data/partition/test_topk.py", "data/partition/test_rules.py"),
    "distributed/executors/local.py": ("distributed/executors/test_executors.py",),
    "distributed/executors/mesh.py": (
        "distributed/executors/test_executors.py",
        "laws/test_executors_agree.py::test_a_data_axis_equals_the_loop_in_float64",
    ),
    "distributed/sync_batchnorm.py": ("distributed/test_sync_batchnorm.py",),
    "ensembles/answers.py": ("prediction/test_cascade.py",),
    "ensembles/cascade.py": ("ensembles/test_cascade.py",),
    "ensembles/combine.py": ("ensembles/test_combine.py",),
    "ensembles/conformal.py": ("ensembles/test_conformal.py",),
    "ensembles/log_probs.py": ("ensembles/test_log_probs.py", "ensembles/test_combine.py"),
    "ensembles/ood_scores.py": ("ensembles/test_ood_scores.py",),
    "ensembles/selection.py": ("ensembles/test_selection.py",),
    "ensembles/selective.py": ("ensembles/test_selective.py",),
    "ensembles/soup_weights.py": ("ensembles/test_soup_weights.py",),
    "ensembles/temperature.py": ("ensembles/test_temperature.py",),
    "evaluation/confidence.py": ("evaluation/test_confidence.py", "evaluation/metrics/test_calibration.py"),
    **{
        f"evaluation/metrics/{name}.py": (f"evaluation/metrics/test_{name}.py",)
        for name in (
            "accuracy", "calibration", "cka", "disagreement", "entropy", "error_overlap", "per_class", "proper_scores",
            "selective", "variance",
        )
    },
    "loss_landscape/apgd.py": ("loss_landscape/probes/test_worst_case.py",),
    "loss_landscape/curvature.py": ("loss_landscape/test_curvature.py",),
    "loss_landscape/groups.py": ("loss_landscape/probes/test_worst_case.py",),
    "loss_landscape/lanczos.py": ("loss_landscape/test_lanczos.py",),
    "loss_landscape/per_sample.py": ("loss_landscape/probes/test_per_sample.py",),
    "loss_landscape/perturbations.py": ("loss_landscape/probes/test_average_case.py",),
    **{
        f"loss_landscape/probes/{name}.py": (f"loss_landscape/probes/test_{name}.py",)
        for name in (
            "average_case", "fisher", "hessian", "per_sample", "relative_flatness", "sam_sharpness", "worst_case",
        )
    },
    "methods/a2d.py": _JOINT,
    "methods/divdis.py": _JOINT,
    "methods/sed.py": _JOINT,
    "methods/sharpbalance.py": _PARTITION,
    "models/modes.py": ("training/loop/test_averaged_weights.py", _PARTITION[0]),
    "models/pruning.py": ("models/test_pruning.py",),
    "optim/forward_records.py": _LOOPS,
    "optim/grad_norms.py": ("optim/test_grad_norms.py",),
    "optim/losses.py": ("optim/test_losses.py", *_JOINT),
    "optim/sam.py": ("optim/test_sam.py",),
    "optim/sample_scores.py": ("optim/test_sample_scores.py",),
    "optim/sample_sharpness.py": _LOOPS,
    "optim/sharpness_aware.py": _LOOPS,
    "optim/weight_averaging.py": ("training/loop/test_averaged_weights.py",),
    "prediction/calibration.py": ("prediction/test_calibration.py", "prediction/test_cascade.py"),
    "prediction/stage_backend.py": ("prediction/test_stage_backend.py",),
    "training/fit_arrays.py": ("training/test_fit_arrays.py",),
    "training/loop/checkpointer.py": ("training/loop/test_checkpointer.py", "training/loop/test_averaged_weights.py"),
    "training/loop/gradients.py": _STEP,
    "training/partition.py": _PARTITION,
}  # fmt: skip
"""The tests of each module below `src/plateaux`, in the order in which they run."""
