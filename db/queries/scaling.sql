-- How much speed does each GPU keep as there are more of them?
SELECT
    model,
    sequence_length,
    global_batch_size,
    num_gpus,
    trial_id,
    layout,
    tokens_per_second,
    tokens_per_second_per_gpu,
    smallest_num_gpus,
    speed_up,
    efficiency,
    is_comparable
FROM v_scaling
WHERE sweep = :sweep
ORDER BY model, sequence_length, global_batch_size, num_gpus
