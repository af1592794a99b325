"""The exam's rows, and what answers each: a run with faults, or tests that are run with the others.

A row is held when everything that answers it holds. A row without an answer says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tests.exam import artefacts, ownership, read_files, saves, supervision, values
from tests.exam.case import Findings, Priority, Verdict
from tests.exam.harness import Lab

Check = Callable[[Lab, Findings], None]


@dataclass(frozen=True)
class Row:
    """One case of the exam."""

    number: int
    priority: Priority
    title: str
    checks: tuple[Check, ...] = ()
    tests: tuple[str, ...] = ()
    """Names of files or tests under tests/, as pytest takes them."""
    missing: str = ""
    """What keeps the case from applying to what exists."""


def row(
    number: int, priority: Priority, title: str, *answers: Check | str, missing: str = ""
) -> Row:
    checks = tuple(answer for answer in answers if not isinstance(answer, str))
    tests = tuple(answer for answer in answers if isinstance(answer, str))
    return Row(number, priority, title, checks, tests, missing)


CORRUPTED = (
    "checkpoint/test_corruption.py::test_every_corruption_is_refused_and_the_one_before_is_used"
)
CHAIN = "checkpoint/test_anywhere.py::test_the_chain_follows_one_process"
CUT = "numerics/test_factorisations.py::test_every_factorisation_equals_the_full_batch"

ROWS: tuple[Row, ...] = (
    # Crash and checkpoint
    row(1, "P0", "SIGKILL of each rank at steps 1, 2, 8, 24", supervision.kills),
    row(2, "P0", "SIGKILL at system calls of a checkpoint write", saves.killed_in_save),
    row(3, "P0", "SIGKILL around the commit", saves.killed_in_save),
    row(4, "P0", "SIGKILL during rotation", saves.killed_in_save),
    row(5, "P0", "SIGTERM in each phase, 5 s grace", supervision.signals),
    row(6, "P0", "SIGINT once, twice, three times", supervision.interruption),
    row(7, "P0", "launcher killed, terminal closed", supervision.orphans),
    row(8, "P0", "disk full at a checkpoint", saves.full_disk, saves.failing_disk,
        "checkpoint/test_async_saver.py::test_a_file_that_cannot_grow_fails_the_save_and_the_next_succeeds"),
    row(9, "P1", "disk too small at the start",
        "checkpoint/test_verify.py::test_a_disk_that_is_too_small_is_refused_with_the_numbers"),
    row(10, "P1", "EIO, EROFS, EDQUOT, EMFILE in a save", saves.failing_disk,
        "checkpoint/test_async_saver.py::test_a_rank_that_cannot_write_fails_the_save_on_all"),
    row(11, "P0", "flipped bits", CORRUPTED),
    row(12, "P0", "truncated shards", CORRUPTED),
    row(13, "P0", "deleted, duplicated, swapped, foreign shards", CORRUPTED,
        "checkpoint/test_corruption.py::test_checkpoints_of_another_run_are_not_taken"),
    row(14, "P1", "corrupt pointer to the latest (there is none: the folder is scanned)",
        "checkpoint/test_async_saver.py::test_what_is_no_checkpoint_is_left_alone", CORRUPTED),
    row(15, "P1", "newer schema, other model, changed job",
        "checkpoint/test_corruption.py::test_one_of_a_newer_version_is_refused_not_passed_over",
        "checkpoint/test_run_dir.py::test_a_run_is_resumed_with_the_job_it_was_begun_with"),
    row(16, "P1", "two jobs in one directory", artefacts.two_jobs),
    row(17, "P1", "a step saved twice",
        "checkpoint/test_async_saver.py::test_saving_a_step_again_replaces_it", artefacts.two_jobs),
    row(18, "P1", "slow writer while training goes on",
        "checkpoint/test_async_saver.py::test_training_goes_on_while_a_snapshot_is_written",
        "checkpoint/test_async_saver.py::test_memory_of_a_snapshot_is_used_again"),
    row(19, "P1", "the same step fails 3 times", supervision.crash_loop),
    # Exactness and elasticity
    row(20, "P0", "the same seed twice", saves.twice),
    row(21, "P0", "resume at every step", saves.resumed_at_every_step),
    row(22, "P0", "another world size", CHAIN,
        "data/test_loader.py::test_samples_of_every_step_are_the_same_for_any_number_of_ranks"),
    row(23, "P1", "ranks that don't divide the batch", CUT,
        "data/test_micro_batches.py::test_every_row_goes_to_one_rank"),
    row(24, "P0", "another strategy", CHAIN),
    row(25, "P1", "another micro-batch at the same global batch", values.stepping_down, CUT),
    row(26, "P0", "every split of one global batch", CUT),
    row(27, "P0", "uneven data", "data/test_loader.py::test_an_epoch_has_each_document_once",
        "data/test_loader.py::test_evaluation_sees_each_document_once",
        "data/test_micro_batches.py::test_too_few_rows_leave_empty_micro_batches"),
    row(28, "P1", "another number of tokenizing processes",
        "data/test_prepare.py::test_several_processes_give_the_same"),
    row(29, "P1", "the learning rate is a function of the step",
        "core/test_lr_schedule.py", saves.twice,
        "checkpoint/test_run_dir.py::test_a_run_is_resumed_with_the_job_it_was_begun_with"),
    # Hangs, slow ranks, memory, numbers
    row(30, "P0", "SIGSTOP in forward, collective, save, data", supervision.hangs),
    row(31, "P0", "GIL held for 30 s", supervision.hangs),
    row(32, "P1", "slow ranks", supervision.pauses,
        "launch/test_watchdog.py::test_a_slow_rank_is_told_once_with_its_phase"),
    row(33, "P1", "long pauses that are allowed", supervision.pauses,
        "launch/test_watchdog.py::test_no_false_alarm_in_10000_steps"),
    row(34, "P0", "NaN in a sample, Inf gradient, NaN weights", values.not_finite,
        values.broken_weights),
    row(35, "P1", "loss spike", values.not_finite, "core/runs/test_loss_spikes.py"),
    row(36, "P1", "out of memory on one rank", values.memory, values.stepping_down),
    row(37, "P1", "a tokenizing process dies, the loader raises",
        "data/test_loader.py::test_an_error_in_the_thread_reaches_the_consumer",
        "data/test_prepare.py::test_a_killed_worker_is_told"),
    row(38, "P1", "one rank raises before a collective", supervision.hangs),
    row(39, "P1", "stale rendezvous, port in use", supervision.crash_loop,
        "launch/test_supervisor.py::test_ranks_find_each_other"),
    # Bad data, bad config, wrong artefacts
    row(40, "P0", "malformed rows",
        "data/test_validate.py::test_the_exam_s_bad_rows_are_all_listed",
        "data/test_validate.py::test_the_exam_s_bad_rows_can_be_skipped",
        "data/test_records.py::test_every_bad_line_of_a_jsonl_file_is_named"),
    row(41, "P0", "empty, filtered, masked, leaking data",
        "data/test_validate.py"),
    row(42, "P1", "very long and very short rows", artefacts.huge_rows),
    row(43, "P0", "templates, stop tokens, tied embeddings", "data/test_chat_template.py",
        "checkpoint/test_export.py::test_tied_embeddings_are_written_once",
        "checkpoint/test_merge.py::test_the_merged_model_computes_the_same"),
    row(44, "P0", "result of each strategy", CHAIN, "checkpoint/test_export.py"),
    row(45, "P0", "hostile YAML", "core/files/test_yaml_document.py", "config/test_job_file.py"),
    # Security
    row(46, "P0", "malicious pickles", artefacts.pickles, artefacts.forbidden_calls),
    row(47, "P0", "Python code in a model's repository",
        "models/test_load.py::test_code_of_others_is_refused",
        "models/test_load.py::test_code_of_others_in_a_tokenizer_is_refused",
        "data/test_chat_template.py::test_a_template_cannot_reach_python"),
    row(48, "P0", "paths that lead outside",
        "checkpoint/test_corruption.py::test_a_manifest_that_names_files_elsewhere_is_refused",
        "models/test_weight_files.py", CORRUPTED),
    row(49, "P0", "shell metacharacters", artefacts.forbidden_calls, artefacts.odd_names),
    row(50, "P0", "the dashboard",
        "dashboard/test_dashboard_app.py::test_who_may_ask",
        "dashboard/test_dashboard_app.py::test_another_site_gets_nothing_and_changes_nothing",
        "dashboard/test_dashboard_app.py::test_hostile_names_and_files_harm_nothing",
        "dashboard/test_dashboard_app.py::test_links_are_refused",
        "dashboard/test_dashboard_app.py::test_a_runs_own_page_is_shown_in_a_sandbox"),
    row(51, "P0", "listening sockets",
        "launch/test_supervisor.py::test_nothing_listens_beyond_loopback"),
    row(52, "P1", "secrets; offline", supervision.crash_loop,
        "training/test_environment.py::test_secrets_stay_out"),
    # Whose a run directory is
    row(53, "P0", "foreign files in the run directory", ownership.users_files,
        "checkpoint/test_ownership.py::test_a_folder_with_files_of_somebody_is_refused_and_left_as_it_is",
        "checkpoint/test_ownership.py::test_what_was_being_written_is_swept_away_and_nothing_else",
        "checkpoint/test_ownership.py::test_dangerous_places_are_refused"),
    row(54, "P0", "--overwrite: foreign files; a new run that fails at its start",
        ownership.users_files,
        "checkpoint/test_ownership.py::test_a_run_that_holds_something_else_is_not_overwritten",
        "checkpoint/test_ownership.py::test_an_overwritten_run_is_back_if_the_new_one_does_not_begin",
        "checkpoint/test_ownership.py::test_an_overwrite_that_is_cut_short_anywhere_is_mended"),
    row(55, "P0", "checkpoints missing at --resume", ownership.lost_and_found,
        "test_train.py::test_a_run_whose_checkpoints_are_out_of_sight_does_not_start_over",
        "test_train.py::test_a_run_that_never_saved_starts_from_its_first_step"),
    row(56, "P0", "checkpoints of another run", ownership.lost_and_found,
        "checkpoint/test_ownership.py::test_checkpoints_of_another_run_are_neither_counted_nor_rotated_nor_replaced"),
    row(57, "P0", "truncated metrics, truncated report", ownership.lost_and_found,
        "checkpoint/test_run_dir.py::test_a_bad_line_of_the_metrics_is_left_out",
        "checkpoint/test_run_dir.py::test_a_report_that_cannot_be_read_is_none"),
    row(58, "P0", "a finished run without its result", ownership.lost_and_found,
        "checkpoint/test_verify.py::test_the_lost_result_of_a_finished_run"),
    row(59, "P0", "run directories in random states",
        "exam/test_hostile.py::test_no_invariant_breaks_in_many_rounds",
        "exam/test_hostile.py::test_every_mutation_changes_something",
        "exam/test_hostile.py::test_what_is_broken_is_noticed"),
    row(60, "P1", "run directories of earlier versions",
        "checkpoint/test_ownership.py::test_a_run_is_known_without_its_marker_or_its_environment"),
    # What is read
    row(61, "P0", "weights missing in the model's files", read_files.incomplete_model,
        "models/test_required_weights.py"),
    row(62, "P0", "NaN in the model's weights", read_files.incomplete_model,
        "models/test_required_weights.py::test_a_weight_that_is_no_number_is_named",
        "models/test_packing_check.py"),
    row(63, "P0", "a damaged result is used", read_files.changed_result,
        "checkpoint/test_verify.py::test_a_damaged_result_is_not_used"),
    row(64, "P0", "damaged data cache", read_files.changed_cache,
        "data/test_prepare.py::test_a_damaged_cache_is_made_anew_with_a_line",
        "data/test_prepare.py::test_a_document_that_the_disk_has_changed_is_found_when_it_is_read"),
    row(65, "P0", "a named pipe in place of a shard", read_files.changed_result,
        "checkpoint/test_verify.py::test_a_pipe_in_the_place_of_a_file_is_named"),
    row(66, "P1", "named pipes, devices, link loops as job, data or model",
        "core/files/test_regular_file.py",
        "data/test_sources.py::test_what_is_neither_a_file_nor_a_folder_is_called_what_it_is",
        "models/test_catalogue.py::test_a_pipe_among_the_files_of_a_model_is_named"),
    row(67, "P1", "a chat template that never ends", "core/host/test_render_limit.py"),
    row(68, "P0", "control tokens in a row's text", "data/test_control_tokens.py"),
    row(69, "P1", "absurd numbers, paths, prompts, configs, tokenizers",
        "config/test_job_file.py::test_numbers_beyond_all_use_are_refused",
        "cli/test_main.py::test_odd_arguments_of_generate_are_a_sentence",
        "cli/test_main.py::test_a_path_that_no_system_takes_is_a_sentence",
        "cli/test_main.py::test_without_docstrings_the_reason_is_named",
        "models/test_load.py::test_an_odd_config_is_a_sentence",
        "models/test_load.py::test_a_broken_tokenizer_is_a_sentence"),
    row(70, "P1", "permissions of a result follow the umask",
        "checkpoint/test_verify.py::test_a_result_can_be_read_by_whom_the_umask_lets"),
    # Streams, signals, schedulers, strangers
    row(71, "P0", "the reader of stdout exits", supervision.reader_gone),
    row(72, "P0", "stdout and stderr block, are full or closed",
        "launch/test_output_stream.py", "launch/test_unread_output.py"),
    row(73, "P0", "SIGTERM or SIGINT to one rank", supervision.signals,
        "launch/test_supervisor.py::test_a_signal_to_one_rank_that_has_not_joined_stops_all"),
    row(74, "P1", "exit codes as documented", "cli/test_exit_codes.py", supervision.signals,
        "launch/test_supervisor.py::test_a_problem_of_a_rank_is_shown_as_a_problem"),
    row(75, "P0", "Slurm: preempted by a signal, requeued",
        "launch/test_slurm_real.py::test_a_preempted_job_comes_back_and_ends_to_the_bit[signal-2]"),
    row(76, "P0", "an unauthenticated peer at the rendezvous", "launch/test_strangers.py"),
    row(77, "P1", "Ray: a hung worker",
        "launch/test_ray.py::test_a_hung_worker_is_named_and_the_run_goes_on"),
    row(78, "P1", "run directory copied to a file system and to S3", "launch/test_ray_storage.py"),
)  # fmt: skip


def count(rows: Sequence[Row], verdicts: Mapping[int, Verdict], priority: str) -> tuple[int, int]:
    """The cases of a priority that are held, and those that apply."""
    found = [verdicts[row.number].outcome for row in rows if row.priority == priority]
    return found.count("held"), len(found) - found.count("not applicable")
