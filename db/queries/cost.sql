-- What do a billion tokens cost with the fastest layout of each cell, in time, money and energy?
-- price (number): US dollars for an hour of one GPU; default: the price of the newest `sweep run`
-- The energy is that of the GPUs alone.
SELECT
    v_best.cell,
    v_best.num_gpus,
    v_best.trial_id,
    v_best.layout,
    v_best.tokens_per_second,
    1e9 / v_best.tokens_per_second / 3600 AS hours,
    1e9 / v_best.tokens_per_second_per_gpu / 3600 AS gpu_hours,
    1e9 / v_best.tokens_per_second_per_gpu / 3600 * coalesce(CAST(:price AS double precision), (
        SELECT session.price_per_gpu_hour
        FROM session
        WHERE session.sweep_id = v_best.sweep_id AND session.price_per_gpu_hour IS NOT NULL
        ORDER BY session.epoch DESC
        LIMIT 1
    )) AS dollars,
    1e9 * measurement.joules_per_token / 3.6e6 AS kilowatt_hours
FROM v_best
JOIN attempt ON attempt.trial_id = v_best.trial_id AND attempt.state = 'measured' AND NOT attempt.superseded
JOIN measurement ON measurement.attempt_id = attempt.id
WHERE v_best.sweep = :sweep AND v_best.is_current
ORDER BY v_best.cell
