-- One row per cell: how many measurements count, how much two runs of one layout differ (its noise floor), and the usual clock of its GPUs.
-- num_runs: measurements that count, repeats included
-- num_repeats: of these, repeats of a layout in fresh processes
-- noise_floor: mean difference of a repeat's step time from that of its trial's first run, relative (A/A); differences below it show nothing; NULL: nothing was repeated
-- largest_change: the largest of these differences
-- usual_gpu_clock_mhz: median of `gpu_clock_mhz` over the measurements that count
CREATE VIEW v_cell AS
SELECT
    sweep.id AS sweep_id,
    sweep.name AS sweep,
    cell.id AS cell_id,
    cell.key AS cell,
    cell.model_name AS model,
    cell.model_digest,
    cell.num_gpus,
    cell.sequence_length,
    cell.global_batch_size,
    count(v_run.trial_id) AS num_runs,
    count(v_run.change_since_first) AS num_repeats,
    avg(abs(v_run.change_since_first)) AS noise_floor,
    max(abs(v_run.change_since_first)) AS largest_change,
    max(v_run.usual_gpu_clock_mhz) AS usual_gpu_clock_mhz
FROM cell
JOIN sweep ON sweep.id = cell.sweep_id
LEFT JOIN v_run ON v_run.cell_id = cell.id
GROUP BY sweep.id, sweep.name, cell.id, cell.key, cell.model_name, cell.model_digest, cell.num_gpus, cell.sequence_length, cell.global_batch_size
