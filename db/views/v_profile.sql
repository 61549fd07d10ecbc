-- What the steps of profiled trials were spent on: one row for each profile, rank and part. Parts that are not hidden add up to the step.
-- profile: number of the profile among those of its trial, from 1
-- part_seconds: time of the part in one step, under the profiler
-- fraction: the part's share of the step, 0 to 1
-- profiled_step_seconds: time of one step under the profiler; the trial's own step time is in `v_trial`
CREATE VIEW v_profile AS
SELECT
    sweep.id AS sweep_id,
    sweep.name AS sweep,
    cell.id AS cell_id,
    cell.key AS cell,
    trial.id AS trial_id,
    trial.layout_key AS layout,
    profile.number AS profile,
    profile.started_at,
    profile_part.rank,
    profile_rank.is_slowest,
    profile_part.part,
    profile_part.is_hidden,
    CAST(profile_part.nanoseconds AS DOUBLE PRECISION) / 1e9 / profile_rank.num_steps AS part_seconds,
    CASE WHEN profile_rank.window_nanoseconds > 0 THEN CAST(profile_part.nanoseconds AS DOUBLE PRECISION) / profile_rank.window_nanoseconds END AS fraction,
    CAST(profile_rank.window_nanoseconds AS DOUBLE PRECISION) / 1e9 / profile_rank.num_steps AS profiled_step_seconds,
    profile_rank.plain_step_seconds,
    profile_rank.attention,
    profile_rank.trace_path
FROM profile_part
JOIN profile_rank ON profile_rank.profile_id = profile_part.profile_id AND profile_rank.rank = profile_part.rank
JOIN profile ON profile.id = profile_part.profile_id
JOIN trial ON trial.id = profile.trial_id
JOIN cell ON cell.id = trial.cell_id
JOIN sweep ON sweep.id = trial.sweep_id
