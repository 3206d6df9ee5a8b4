"""Questions that every operator is asked, by tables of its cases, which its test files have.

from testing.operators import *        # the tests, each asked of the rows of one table, as CASES or REFUSED
CASES = (Case("rms_norm", rms_norm, lambda n: ((n, 8), (8,)), definition=formula), ...)
"""

from .case import Case, Input, integers, only_at
from .compilers import (
    test_a_backward_is_compiled_by_itself,
    test_a_trace_has_the_operator_and_its_gradient,
    test_compiles_to_one_graph_for_any_number_of_tokens,
    test_exported_programs_can_be_saved,
)
from .derivatives import (
    test_a_result_that_is_changed_in_place_is_differentiated_or_refused_by_autograd,
    test_a_tangent_is_refused_by_name,
    test_forward_mode_is_that_of_the_definition,
    test_functional_gradients_are_autograds,
    test_result_and_gradients_are_the_definitions,
    test_second_derivative_is_refused,
    test_several_upstream_gradients_give_what_each_does,
    test_vmap_gives_what_each_call_does,
)
from .errors import Wide, test_a_tensor_that_is_not_dense_is_refused, test_fp64_is_for_the_cpu_alone, test_refused
from .explaining import test_bytes_are_those_of_the_formula, test_explained_steps_are_those_that_are_made
from .imports import test_every_page_is_imported_without_triton_and_a_launch_says_what_to_install
from .registration import (
    test_every_operator_is_called_by_a_case,
    test_operators_are_registered_properly,
    test_results_lie_as_the_compiler_is_told,
    test_tensors_without_data_have_the_same_shapes,
)
from .sharded import test_shards_are_the_whole
from .training import (
    test_activation_checkpointing,
    test_an_input_made_in_inference_mode_is_taken_where_the_definition_takes_it,
    test_autocast,
    test_graph_capture,
    test_inference_mode,
    test_no_token_depends_on_the_others,
    test_nothing_waits_for_the_device,
    test_saves_what_the_backward_reads_and_nothing_else,
)

__all__ = [
    "Case",
    "Input",
    "Wide",
    "integers",
    "only_at",
    "test_a_backward_is_compiled_by_itself",
    "test_a_result_that_is_changed_in_place_is_differentiated_or_refused_by_autograd",
    "test_a_tangent_is_refused_by_name",
    "test_a_tensor_that_is_not_dense_is_refused",
    "test_a_trace_has_the_operator_and_its_gradient",
    "test_activation_checkpointing",
    "test_an_input_made_in_inference_mode_is_taken_where_the_definition_takes_it",
    "test_autocast",
    "test_bytes_are_those_of_the_formula",
    "test_compiles_to_one_graph_for_any_number_of_tokens",
    "test_every_operator_is_called_by_a_case",
    "test_every_page_is_imported_without_triton_and_a_launch_says_what_to_install",
    "test_explained_steps_are_those_that_are_made",
    "test_exported_programs_can_be_saved",
    "test_forward_mode_is_that_of_the_definition",
    "test_fp64_is_for_the_cpu_alone",
    "test_functional_gradients_are_autograds",
    "test_graph_capture",
    "test_inference_mode",
    "test_no_token_depends_on_the_others",
    "test_nothing_waits_for_the_device",
    "test_operators_are_registered_properly",
    "test_refused",
    "test_result_and_gradients_are_the_definitions",
    "test_results_lie_as_the_compiler_is_told",
    "test_saves_what_the_backward_reads_and_nothing_else",
    "test_second_derivative_is_refused",
    "test_several_upstream_gradients_give_what_each_does",
    "test_shards_are_the_whole",
    "test_tensors_without_data_have_the_same_shapes",
    "test_vmap_gives_what_each_call_does",
]
