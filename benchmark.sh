#!/usr/bin/env bash
# The cells of the paper's tables and figures, and what runs them, on this machine or on a Slurm cluster.
#
#   ./benchmark.sh SUITE [--seeds 5] [--env-seeds 1] [--first-seed 1] [--workers 2] [--track] [--only PATTERN]
#                        [--dry-run] [--slurm [SBATCH OPTIONS]]
#
#   SUITE         smoke, search, search-100k, table1, table2, table2-100k, ablations-dqn, ablations-sac, lambda, weighting
#                 or all (the paper's)
#   --seeds       runs of each cell
#   --env-seeds   if above 1: environment seeds, each with all seeds of the networks (the paper: 5 x 5)
#   --first-seed  the first of the seeds: 1, or 101 in the searches, whose seeds the tables do not use
#   --workers     runs at a time; each gets its share of the cores, but the discrete scripts one thread, which is faster
#   --track       log to Weights & Biases, grouped by suite, environment and system
#   --only        launch only the runs whose name matches this regular expression
#   --dry-run     print the commands, one a line
#   --slurm       submit one job array, at most --workers tasks at a time; what follows is passed on to sbatch
#
# A run's name is {environment}__{system}__{seed}. Started again, finished runs are skipped, interrupted ones resumed, and
# those that another process holds are left to it. The exit code is 0 if all runs are finished. Ctrl-C or SIGTERM stops the
# runs, which first finish their episode; the same once more stops them at once.
#
# Variables: RUNS_DIR (runs), PYTHON (python), and STOP_SECONDS (600), after which a run that does not stop is killed. One
# episode of Table 2's IV-SAC, with its 1000 updates, takes four minutes on one thread.
trap 'exit 130' INT # until runs are started, which stop() is for
trap 'exit 143' TERM
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# ============================================================================ the cells
# One row is one cell: suites | system | environment | script | arguments.
# Names that begin with $ are groups of arguments; where an option is repeated, its last value counts.
paper_suites="table1|table2|ablations-dqn|ablations-sac|lambda|weighting"
other_suites="smoke|search|search-100k|table2-100k"
cells=""

# ---------------------------------------------------------------------------- LunarLander: Table 1, Fig. 3 and 4, solved at 200
# SunriseDQN was not published: the best of the search. IV-DQN was published with a constant xi = 10; here it keeps a minimal
# effective batch size, as in the paper's text. As in its equations, a terminal target's variance is that of any other: with 0
# in its place IV-DQN is slower (docs/reproduction.md).
lunar="--total-episodes 500 --solved-at 200 --gamma 0.99 --tau 0.005 --epsilon-decay 0.99"
iv="$lunar --batch-size 64 --learning-rate 1e-3 --mask-prob 1 --prior-scale 0 --loss-attenuation-weight 1.5"
iv_lunar="$iv --terminal-variance"
cells+="
table1,ablations-dqn                  | DQN          | LunarLander-v3 | dqn.py           | $lunar --batch-size 128 --learning-rate 5e-4
table1,ablations-dqn                  | BootstrapDQN | LunarLander-v3 | bootstrap_dqn.py | $lunar --batch-size 64 --learning-rate 5e-4 --mask-prob 0.9 --prior-scale 10
table1                                | SunriseDQN   | LunarLander-v3 | sunrise_dqn.py   | $lunar --batch-size 64 --learning-rate 1e-3 --mask-prob 0.9 --prior-scale 1 --sunrise-temperature 50
table1,ablations-dqn,lambda,weighting | IV-DQN       | LunarLander-v3 | ivdqn.py         | $iv_lunar --mebs-ratio 0.9
"
# Fig. 4: the ablations. The L2 systems were not published: the settings of their BIV counterparts.
network="$lunar --num-nets 1 --batch-size 256 --learning-rate 5e-4 --loss-attenuation-weight 1"
network+=" --tau 0.001 --epsilon-decay 0.991 --terminal-variance"
cells+="
ablations-dqn | BIV+BootstrapDQN  | LunarLander-v3 | ivdqn.py | $lunar --batch-size 64 --learning-rate 5e-4 --mask-prob 0.5 --prior-scale 0.1 --no-variance-heads --terminal-variance --mebs-ratio 0.75
ablations-dqn | L2+VarEnsembleDQN | LunarLander-v3 | ivdqn.py | $iv_lunar --weighting l2
ablations-dqn | BIV+VarNetworkDQN | LunarLander-v3 | ivdqn.py | $network --mebs-ratio 0.8125
ablations-dqn | L2+VarNetworkDQN  | LunarLander-v3 | ivdqn.py | $network --weighting l2
"
# Appendix F: other weights.
cells+="
weighting | UWAC+VarEnsembleDQN    | LunarLander-v3 | ivdqn.py | $iv_lunar --weighting uwac --uwac-beta 0.8
weighting | Sunrise+VarEnsembleDQN | LunarLander-v3 | ivdqn.py | $iv_lunar --weighting sunrise --sunrise-temperature 50
"
# Appendix C. Its values are taken to be those of the authors' code, where L_LA counts by half: their 1, 2, 5, 10 are
# 0.5, 1, 2.5, 5 here.
for lambda in 0.005 0.5 1 2.5 5 500; do
  cells+="
lambda | IV-DQN-lambda=$lambda | LunarLander-v3 | ivdqn.py | $iv_lunar --mebs-ratio 0.9 --loss-attenuation-weight $lambda
"
done

# ---------------------------------------------------------------------------- MountainCar: Table 1, solved at -150
# Time limits are terminal states, as in the published code: DQN depends on it. DQN's setting is the published one. The ensembles
# have the published tau, prior, xi and lambda, but explore by their priors alone, as in the paper's text: the published code also
# took epsilon-greedy actions. SunriseDQN and IV-DQN have a mask of 0.9 (published: 0.5), by the search.
car="--total-episodes 500 --solved-at -150 --gamma 0.99 --batch-size 256 --learning-rate 1e-3 --truncation-terminates"
prior="$car --tau 0.05 --prior-scale 10 --start-epsilon 0 --end-epsilon 0"
iv_car="--loss-attenuation-weight 0.5 --xi 1000"
cells+="
table1 | DQN          | MountainCar-v0 | dqn.py           | $car --tau 0.01 --epsilon-decay 0.98
table1 | BootstrapDQN | MountainCar-v0 | bootstrap_dqn.py | $prior --mask-prob 0.5
table1 | SunriseDQN   | MountainCar-v0 | sunrise_dqn.py   | $prior --mask-prob 0.9 --sunrise-temperature 50
table1 | IV-DQN       | MountainCar-v0 | ivdqn.py         | $prior --mask-prob 0.9 $iv_car
"

# ---------------------------------------------------------------------------- Cartpole-Noise: Table 1, solved at 750 without noise
# The published set-up: 4-step returns, 50 units, hard targets, clipped gradients, an update each second step. But a discount of
# 0.997: their 4-step targets bootstrap with gamma^1 from s_{t+3}, which amounts to 0.9967 a step. DQN and SunriseDQN were not
# published: the best of the search. Fig. 4's other systems were not published: IV-DQN's settings.
noisy="--eval-env-id paper_envs:Cartpole-v0 --total-episodes 300 --solved-at 750 --n-step 4 --hidden-size 50 --train-frequency 2"
noisy+=" --target-network-frequency 50 --tau 1 --max-grad-norm 5 --learning-starts 64 --buffer-size 65536 --learning-rate 1e-3"
noisy+=" --start-epsilon 0.05 --end-epsilon 0.05"
cartpole="$noisy --gamma 0.997 --batch-size 128"
half="--mask-prob 0.5 --prior-scale 0"
iv_pole="$cartpole $half --no-terminal-variance --mebs-ratio 0.99 --loss-attenuation-weight 5"
for noise in 0.1 0.3 1 3 10; do
  cells+="
table1               | DQN               | paper_envs:CartpoleNoise$noise-v0 | dqn.py           | $cartpole --batch-size 256
table1,ablations-dqn | BootstrapDQN      | paper_envs:CartpoleNoise$noise-v0 | bootstrap_dqn.py | $cartpole $half
table1               | SunriseDQN        | paper_envs:CartpoleNoise$noise-v0 | sunrise_dqn.py   | $cartpole $half --sunrise-temperature 50
table1,ablations-dqn | IV-DQN            | paper_envs:CartpoleNoise$noise-v0 | ivdqn.py         | $iv_pole
ablations-dqn        | BIV+BootstrapDQN  | paper_envs:CartpoleNoise$noise-v0 | ivdqn.py         | $iv_pole --no-variance-heads
ablations-dqn        | L2+VarEnsembleDQN | paper_envs:CartpoleNoise$noise-v0 | ivdqn.py         | $iv_pole --weighting l2
"
done

# ---------------------------------------------------------------------------- MBBL: Table 2 and Fig. 5
# SAC and SunriseSAC were not published: EnsembleSAC's settings, and a temperature of 20. SlimHumanoid's were not: Walker2d's.
mbbl="--total-timesteps 200000 --checkpoint-every 1000 --rollout-length 1000 --policy-lr 3e-4 --q-lr 3e-4 --gamma 0.99 --tau 0.005"
mbbl_512="$mbbl --batch-size 512"
mbbl_1024="$mbbl --batch-size 1024"
walker="--mask-prob 1 --ucb 1"
cheetah="--mask-prob 0.9 --ucb 0"
hopper="--mask-prob 1 --ucb 10"
ant="--mask-prob 0.9 --ucb 10"
humanoid="--mask-prob 1 --ucb 1"
iv_walker="--mask-prob 0.9 --ucb 10 --mebs-ratio 0.8 --loss-attenuation-weight 2.5"
iv_cheetah="--mask-prob 1 --ucb 0 --mebs-ratio 0.99 --loss-attenuation-weight 1"
iv_hopper="--mask-prob 0.7 --ucb 10 --mebs-ratio 0.8 --loss-attenuation-weight 5"
iv_ant="--mask-prob 1 --ucb 1 --mebs-ratio 0.9 --loss-attenuation-weight 2.5"
iv_humanoid="--mask-prob 0.9 --ucb 10 --mebs-ratio 0.8 --loss-attenuation-weight 2.5"
cells+="
table2                                | SAC         | paper_envs:MBBL-Walker2d-v0     | sac.py          | $mbbl_512
table2,ablations-sac                  | EnsembleSAC | paper_envs:MBBL-Walker2d-v0     | ensemble_sac.py | $mbbl_512 $walker
table2                                | SunriseSAC  | paper_envs:MBBL-Walker2d-v0     | sunrise.py      | $mbbl_512 $walker --sunrise-temperature 20
table2,ablations-sac,lambda,weighting | IV-SAC      | paper_envs:MBBL-Walker2d-v0     | ivsac.py        | $mbbl_1024 $iv_walker

table2                                | SAC         | paper_envs:MBBL-HalfCheetah-v0  | sac.py          | $mbbl_1024
table2,ablations-sac                  | EnsembleSAC | paper_envs:MBBL-HalfCheetah-v0  | ensemble_sac.py | $mbbl_1024 $cheetah
table2                                | SunriseSAC  | paper_envs:MBBL-HalfCheetah-v0  | sunrise.py      | $mbbl_1024 $cheetah --sunrise-temperature 20
table2,ablations-sac,lambda,weighting | IV-SAC      | paper_envs:MBBL-HalfCheetah-v0  | ivsac.py        | $mbbl_1024 $iv_cheetah

table2                                | SAC         | paper_envs:MBBL-Hopper-v0       | sac.py          | $mbbl_512
table2                                | EnsembleSAC | paper_envs:MBBL-Hopper-v0       | ensemble_sac.py | $mbbl_512 $hopper
table2                                | SunriseSAC  | paper_envs:MBBL-Hopper-v0       | sunrise.py      | $mbbl_512 $hopper --sunrise-temperature 20
table2,lambda                         | IV-SAC      | paper_envs:MBBL-Hopper-v0       | ivsac.py        | $mbbl_1024 $iv_hopper

table2                                | SAC         | paper_envs:MBBL-Ant-v0          | sac.py          | $mbbl_512
table2                                | EnsembleSAC | paper_envs:MBBL-Ant-v0          | ensemble_sac.py | $mbbl_512 $ant
table2                                | SunriseSAC  | paper_envs:MBBL-Ant-v0          | sunrise.py      | $mbbl_512 $ant --sunrise-temperature 20
table2,lambda                         | IV-SAC      | paper_envs:MBBL-Ant-v0          | ivsac.py        | $mbbl_1024 $iv_ant

table2                                | SAC         | paper_envs:MBBL-SlimHumanoid-v0 | sac.py          | $mbbl_512
table2                                | EnsembleSAC | paper_envs:MBBL-SlimHumanoid-v0 | ensemble_sac.py | $mbbl_512 $humanoid
table2                                | SunriseSAC  | paper_envs:MBBL-SlimHumanoid-v0 | sunrise.py      | $mbbl_512 $humanoid --sunrise-temperature 20
table2,lambda                         | IV-SAC      | paper_envs:MBBL-SlimHumanoid-v0 | ivsac.py        | $mbbl_1024 $iv_humanoid
"
# Fig. 5 and appendix F: the ablations and the other weights. Of these, HalfCheetah's BIV+EnsembleSAC and BIV+VarNetworkSAC were
# published. The others have IV-SAC's settings, and L2+VarNetworkSAC those of its BIV counterpart.
network_cheetah="$mbbl_1024 $iv_cheetah --num-nets 1 --loss-attenuation-weight 2.5"
cells+="
ablations-sac | BIV+EnsembleSAC        | paper_envs:MBBL-Walker2d-v0    | ivsac.py | $mbbl_1024 $iv_walker --no-variance-heads
ablations-sac | L2+VarEnsembleSAC      | paper_envs:MBBL-Walker2d-v0    | ivsac.py | $mbbl_1024 $iv_walker --weighting l2
ablations-sac | BIV+VarNetworkSAC      | paper_envs:MBBL-Walker2d-v0    | ivsac.py | $mbbl_1024 $iv_walker --num-nets 1
ablations-sac | L2+VarNetworkSAC       | paper_envs:MBBL-Walker2d-v0    | ivsac.py | $mbbl_1024 $iv_walker --num-nets 1 --weighting l2
weighting     | UWAC+VarEnsembleSAC    | paper_envs:MBBL-Walker2d-v0    | ivsac.py | $mbbl_1024 $iv_walker --weighting uwac --uwac-beta 0.8
weighting     | Sunrise+VarEnsembleSAC | paper_envs:MBBL-Walker2d-v0    | ivsac.py | $mbbl_1024 $iv_walker --weighting sunrise --sunrise-temperature 20

ablations-sac | BIV+EnsembleSAC        | paper_envs:MBBL-HalfCheetah-v0 | ivsac.py | $mbbl_1024 $iv_cheetah --no-variance-heads --mask-prob 0.9 --ucb 10
ablations-sac | L2+VarEnsembleSAC      | paper_envs:MBBL-HalfCheetah-v0 | ivsac.py | $mbbl_1024 $iv_cheetah --weighting l2
ablations-sac | BIV+VarNetworkSAC      | paper_envs:MBBL-HalfCheetah-v0 | ivsac.py | $network_cheetah --mebs-ratio 0.5
ablations-sac | L2+VarNetworkSAC       | paper_envs:MBBL-HalfCheetah-v0 | ivsac.py | $network_cheetah --weighting l2
weighting     | UWAC+VarEnsembleSAC    | paper_envs:MBBL-HalfCheetah-v0 | ivsac.py | $mbbl_1024 $iv_cheetah --weighting uwac --uwac-beta 0.8
weighting     | Sunrise+VarEnsembleSAC | paper_envs:MBBL-HalfCheetah-v0 | ivsac.py | $mbbl_1024 $iv_cheetah --weighting sunrise --sunrise-temperature 20
"
# Appendix C: lambda around the chosen one in all environments; at its extremes in two. The chosen one itself is IV-SAC.
for lambda in 0.005 0.5 1 5 500; do
  cells+="
lambda | IV-SAC-lambda=$lambda | paper_envs:MBBL-Walker2d-v0     | ivsac.py | $mbbl_1024 $iv_walker --loss-attenuation-weight $lambda
lambda | IV-SAC-lambda=$lambda | paper_envs:MBBL-SlimHumanoid-v0 | ivsac.py | $mbbl_1024 $iv_humanoid --loss-attenuation-weight $lambda
"
done
for lambda in 0.5 2.5 5; do
  cells+="
lambda | IV-SAC-lambda=$lambda | paper_envs:MBBL-HalfCheetah-v0 | ivsac.py | $mbbl_1024 $iv_cheetah --loss-attenuation-weight $lambda
"
done
for lambda in 0.5 1 2.5; do
  cells+="
lambda | IV-SAC-lambda=$lambda | paper_envs:MBBL-Hopper-v0 | ivsac.py | $mbbl_1024 $iv_hopper --loss-attenuation-weight $lambda
"
done
for lambda in 0.5 1 5; do
  cells+="
lambda | IV-SAC-lambda=$lambda | paper_envs:MBBL-Ant-v0 | ivsac.py | $mbbl_1024 $iv_ant --loss-attenuation-weight $lambda
"
done

# ---------------------------------------------------------------------------- MBBL at a smaller price: Table 2's first half
# Batch 256 and 100,000 steps, one thread a run.
mbbl_100k="$mbbl --total-timesteps 100000 --batch-size 256 --num-threads 1 --matmul-precision medium"
cells+="
table2-100k | SAC         | paper_envs:MBBL-Hopper-v0       | sac.py          | $mbbl_100k
table2-100k | EnsembleSAC | paper_envs:MBBL-Hopper-v0       | ensemble_sac.py | $mbbl_100k $hopper
table2-100k | SunriseSAC  | paper_envs:MBBL-Hopper-v0       | sunrise.py      | $mbbl_100k $hopper --sunrise-temperature 20
table2-100k | IV-SAC      | paper_envs:MBBL-Hopper-v0       | ivsac.py        | $mbbl_100k $iv_hopper

table2-100k | SAC         | paper_envs:MBBL-Walker2d-v0     | sac.py          | $mbbl_100k
table2-100k | EnsembleSAC | paper_envs:MBBL-Walker2d-v0     | ensemble_sac.py | $mbbl_100k $walker
table2-100k | SunriseSAC  | paper_envs:MBBL-Walker2d-v0     | sunrise.py      | $mbbl_100k $walker --sunrise-temperature 20
table2-100k | IV-SAC      | paper_envs:MBBL-Walker2d-v0     | ivsac.py        | $mbbl_100k $iv_walker

table2-100k | SAC         | paper_envs:MBBL-HalfCheetah-v0  | sac.py          | $mbbl_100k
table2-100k | EnsembleSAC | paper_envs:MBBL-HalfCheetah-v0  | ensemble_sac.py | $mbbl_100k $cheetah
table2-100k | SunriseSAC  | paper_envs:MBBL-HalfCheetah-v0  | sunrise.py      | $mbbl_100k $cheetah --sunrise-temperature 20
table2-100k | IV-SAC      | paper_envs:MBBL-HalfCheetah-v0  | ivsac.py        | $mbbl_100k $iv_cheetah

table2-100k | SAC         | paper_envs:MBBL-Ant-v0          | sac.py          | $mbbl_100k
table2-100k | EnsembleSAC | paper_envs:MBBL-Ant-v0          | ensemble_sac.py | $mbbl_100k $ant
table2-100k | SunriseSAC  | paper_envs:MBBL-Ant-v0          | sunrise.py      | $mbbl_100k $ant --sunrise-temperature 20
table2-100k | IV-SAC      | paper_envs:MBBL-Ant-v0          | ivsac.py        | $mbbl_100k $iv_ant

table2-100k | SAC         | paper_envs:MBBL-SlimHumanoid-v0 | sac.py          | $mbbl_100k
table2-100k | EnsembleSAC | paper_envs:MBBL-SlimHumanoid-v0 | ensemble_sac.py | $mbbl_100k $humanoid
table2-100k | SunriseSAC  | paper_envs:MBBL-SlimHumanoid-v0 | sunrise.py      | $mbbl_100k $humanoid --sunrise-temperature 20
table2-100k | IV-SAC      | paper_envs:MBBL-SlimHumanoid-v0 | ivsac.py        | $mbbl_100k $iv_humanoid
"

# ---------------------------------------------------------------------------- the search behind table2-100k
# The weight of UCB, for every system that has one, on a seed that the table does not use. SunriseSAC takes EnsembleSAC's.
mbbl_60k="$mbbl_100k --total-timesteps 60000"
for ucb in 0 1 10; do
  cells+="
search-100k | EnsembleSAC-ucb=$ucb | paper_envs:MBBL-Hopper-v0      | ensemble_sac.py | $mbbl_60k $hopper --ucb $ucb
search-100k | IV-SAC-ucb=$ucb      | paper_envs:MBBL-Hopper-v0      | ivsac.py        | $mbbl_60k $iv_hopper --ucb $ucb
search-100k | EnsembleSAC-ucb=$ucb | paper_envs:MBBL-Walker2d-v0    | ensemble_sac.py | $mbbl_60k $walker --ucb $ucb
search-100k | IV-SAC-ucb=$ucb      | paper_envs:MBBL-Walker2d-v0    | ivsac.py        | $mbbl_60k $iv_walker --ucb $ucb
search-100k | EnsembleSAC-ucb=$ucb | paper_envs:MBBL-HalfCheetah-v0 | ensemble_sac.py | $mbbl_60k $cheetah --ucb $ucb
search-100k | IV-SAC-ucb=$ucb      | paper_envs:MBBL-HalfCheetah-v0 | ivsac.py        | $mbbl_60k $iv_cheetah --ucb $ucb
"
done

# ---------------------------------------------------------------------------- the search behind Table 1
# On seeds the table does not use: five settings for each system on LunarLander and Cartpole-Noise, four on MountainCar, a being
# the published one or the nearest to it.
published="$lunar --batch-size 64 --learning-rate 5e-4 --mask-prob 0.9 --prior-scale 10"
iv_zero="$iv --no-terminal-variance"
cells+="
search | DQN-a          | LunarLander-v3 | dqn.py           | $lunar --batch-size 128 --learning-rate 5e-4
search | DQN-b          | LunarLander-v3 | dqn.py           | $lunar --batch-size 64 --learning-rate 1e-3
search | DQN-c          | LunarLander-v3 | dqn.py           | $lunar --batch-size 128 --learning-rate 1e-3
search | DQN-d          | LunarLander-v3 | dqn.py           | $lunar --batch-size 256 --learning-rate 5e-4
search | DQN-e          | LunarLander-v3 | dqn.py           | $lunar --batch-size 128 --learning-rate 5e-4 --tau 0.01

search | BootstrapDQN-a | LunarLander-v3 | bootstrap_dqn.py | $published
search | BootstrapDQN-b | LunarLander-v3 | bootstrap_dqn.py | $published --learning-rate 1e-3 --mask-prob 1 --prior-scale 0
search | BootstrapDQN-c | LunarLander-v3 | bootstrap_dqn.py | $published --learning-rate 1e-3 --prior-scale 1
search | BootstrapDQN-d | LunarLander-v3 | bootstrap_dqn.py | $published --prior-scale 1
search | BootstrapDQN-e | LunarLander-v3 | bootstrap_dqn.py | $published --batch-size 128

search | SunriseDQN-a   | LunarLander-v3 | sunrise_dqn.py   | $published --sunrise-temperature 50
search | SunriseDQN-b   | LunarLander-v3 | sunrise_dqn.py   | $published --sunrise-temperature 50 --learning-rate 1e-3 --mask-prob 1 --prior-scale 0
search | SunriseDQN-c   | LunarLander-v3 | sunrise_dqn.py   | $published --sunrise-temperature 50 --learning-rate 1e-3 --prior-scale 1
search | SunriseDQN-d   | LunarLander-v3 | sunrise_dqn.py   | $published --sunrise-temperature 10
search | SunriseDQN-e   | LunarLander-v3 | sunrise_dqn.py   | $published --sunrise-temperature 20

search | IV-DQN-a       | LunarLander-v3 | ivdqn.py         | $iv_zero --xi 10
search | IV-DQN-b       | LunarLander-v3 | ivdqn.py         | $iv_zero --mebs-ratio 0.9
search | IV-DQN-c       | LunarLander-v3 | ivdqn.py         | $iv_zero --mebs-ratio 0.9 --learning-rate 5e-4
search | IV-DQN-d       | LunarLander-v3 | ivdqn.py         | $iv_lunar --xi 10
search | IV-DQN-e       | LunarLander-v3 | ivdqn.py         | $iv_lunar --mebs-ratio 0.9
"
# MountainCar: with the published settings, exploration by the priors alone, and without priors.
ensemble="$car --tau 0.05"
greedy="--start-epsilon 1 --end-epsilon 0.01 --epsilon-decay 0.98"
prior_only="--prior-scale 10 --start-epsilon 0 --end-epsilon 0"
cells+="
search | DQN-a          | MountainCar-v0 | dqn.py           | $car --tau 0.01 --epsilon-decay 0.98
search | DQN-b          | MountainCar-v0 | dqn.py           | $car --tau 0.05 --epsilon-decay 0.98
search | DQN-c          | MountainCar-v0 | dqn.py           | $car --tau 0.01 --epsilon-decay 0.99
search | DQN-d          | MountainCar-v0 | dqn.py           | $car --tau 0.01 --epsilon-decay 0.98 --learning-rate 5e-4

search | BootstrapDQN-a | MountainCar-v0 | bootstrap_dqn.py | $ensemble --mask-prob 0.5 --prior-scale 10 $greedy
search | BootstrapDQN-b | MountainCar-v0 | bootstrap_dqn.py | $ensemble --mask-prob 0.5 $prior_only
search | BootstrapDQN-c | MountainCar-v0 | bootstrap_dqn.py | $ensemble --mask-prob 0.9 $prior_only
search | BootstrapDQN-d | MountainCar-v0 | bootstrap_dqn.py | $ensemble --mask-prob 0.5 --prior-scale 0 $greedy

search | SunriseDQN-a   | MountainCar-v0 | sunrise_dqn.py   | $ensemble --mask-prob 0.5 --prior-scale 10 $greedy --sunrise-temperature 50
search | SunriseDQN-b   | MountainCar-v0 | sunrise_dqn.py   | $ensemble --mask-prob 0.5 $prior_only --sunrise-temperature 50
search | SunriseDQN-c   | MountainCar-v0 | sunrise_dqn.py   | $ensemble --mask-prob 0.9 $prior_only --sunrise-temperature 50
search | SunriseDQN-d   | MountainCar-v0 | sunrise_dqn.py   | $ensemble --mask-prob 0.5 --prior-scale 0 $greedy --sunrise-temperature 50

search | IV-DQN-a       | MountainCar-v0 | ivdqn.py         | $ensemble --mask-prob 0.5 --prior-scale 10 $greedy $iv_car
search | IV-DQN-b       | MountainCar-v0 | ivdqn.py         | $ensemble --mask-prob 0.5 $prior_only $iv_car
search | IV-DQN-c       | MountainCar-v0 | ivdqn.py         | $ensemble --mask-prob 0.9 $prior_only $iv_car
search | IV-DQN-d       | MountainCar-v0 | ivdqn.py         | $ensemble --mask-prob 0.5 --prior-scale 0 $greedy $iv_car
"
# Cartpole-Noise at a scale of 1, with the published 4-step returns and all that goes with them.
pole="$noisy --gamma 0.99 --batch-size 128"
iv_noise="--loss-attenuation-weight 5 --mebs-ratio 0.99"
cells+="
search | DQN-a          | paper_envs:CartpoleNoise1-v0 | dqn.py           | $pole
search | DQN-b          | paper_envs:CartpoleNoise1-v0 | dqn.py           | $pole --learning-rate 5e-4
search | DQN-c          | paper_envs:CartpoleNoise1-v0 | dqn.py           | $pole --gamma 0.997
search | DQN-d          | paper_envs:CartpoleNoise1-v0 | dqn.py           | $pole --batch-size 256
search | DQN-e          | paper_envs:CartpoleNoise1-v0 | dqn.py           | $pole --gamma 0.997 --batch-size 256

search | BootstrapDQN-a | paper_envs:CartpoleNoise1-v0 | bootstrap_dqn.py | $pole $half
search | BootstrapDQN-b | paper_envs:CartpoleNoise1-v0 | bootstrap_dqn.py | $pole --mask-prob 1 --prior-scale 0
search | BootstrapDQN-c | paper_envs:CartpoleNoise1-v0 | bootstrap_dqn.py | $pole $half --gamma 0.997
search | BootstrapDQN-d | paper_envs:CartpoleNoise1-v0 | bootstrap_dqn.py | $pole $half --learning-rate 5e-4
search | BootstrapDQN-e | paper_envs:CartpoleNoise1-v0 | bootstrap_dqn.py | $pole --mask-prob 1 --prior-scale 0 --gamma 0.997

search | SunriseDQN-a   | paper_envs:CartpoleNoise1-v0 | sunrise_dqn.py   | $pole $half --sunrise-temperature 50
search | SunriseDQN-b   | paper_envs:CartpoleNoise1-v0 | sunrise_dqn.py   | $pole --mask-prob 1 --prior-scale 0 --sunrise-temperature 50
search | SunriseDQN-c   | paper_envs:CartpoleNoise1-v0 | sunrise_dqn.py   | $pole $half --gamma 0.997 --sunrise-temperature 50
search | SunriseDQN-d   | paper_envs:CartpoleNoise1-v0 | sunrise_dqn.py   | $pole $half --sunrise-temperature 10
search | SunriseDQN-e   | paper_envs:CartpoleNoise1-v0 | sunrise_dqn.py   | $pole $half --gamma 0.997 --sunrise-temperature 10

search | IV-DQN-a       | paper_envs:CartpoleNoise1-v0 | ivdqn.py         | $pole $half $iv_noise --no-terminal-variance
search | IV-DQN-b       | paper_envs:CartpoleNoise1-v0 | ivdqn.py         | $pole --mask-prob 1 --prior-scale 0 $iv_noise --no-terminal-variance
search | IV-DQN-c       | paper_envs:CartpoleNoise1-v0 | ivdqn.py         | $pole $half --gamma 0.997 $iv_noise --no-terminal-variance
search | IV-DQN-d       | paper_envs:CartpoleNoise1-v0 | ivdqn.py         | $pole $half $iv_noise --terminal-variance
search | IV-DQN-e       | paper_envs:CartpoleNoise1-v0 | ivdqn.py         | $pole $half --gamma 0.997 $iv_noise --terminal-variance
"

# ---------------------------------------------------------------------------- every system, for seconds
brief="--total-timesteps 600 --learning-starts 100 --batch-size 32 --checkpoint-every 200 --log-every 100"
brief_sac="$brief --hidden-size 32 --rollout-length 50 --eval-every 200"
cells+="
smoke | DQN                    | CartPole-v1                  | dqn.py           | $brief
smoke | BootstrapDQN           | CartPole-v1                  | bootstrap_dqn.py | $brief
smoke | SunriseDQN             | CartPole-v1                  | sunrise_dqn.py   | $brief
smoke | IV-DQN                 | CartPole-v1                  | ivdqn.py         | $brief
smoke | BIV+BootstrapDQN       | CartPole-v1                  | ivdqn.py         | $brief --no-variance-heads
smoke | L2+VarEnsembleDQN      | CartPole-v1                  | ivdqn.py         | $brief --weighting l2
smoke | BIV+VarNetworkDQN      | CartPole-v1                  | ivdqn.py         | $brief --num-nets 1
smoke | L2+VarNetworkDQN       | CartPole-v1                  | ivdqn.py         | $brief --num-nets 1 --weighting l2
smoke | IV-DQN-xi=10           | paper_envs:CartpoleNoise1-v0 | ivdqn.py         | $brief --eval-env-id paper_envs:Cartpole-v0 --xi 10
smoke | SAC                    | Pendulum-v1                  | sac.py           | $brief_sac
smoke | EnsembleSAC            | Pendulum-v1                  | ensemble_sac.py  | $brief_sac
smoke | SunriseSAC             | Pendulum-v1                  | sunrise.py       | $brief_sac
smoke | IV-SAC                 | Pendulum-v1                  | ivsac.py         | $brief_sac
smoke | BIV+EnsembleSAC        | Pendulum-v1                  | ivsac.py         | $brief_sac --no-variance-heads
smoke | L2+VarEnsembleSAC      | Pendulum-v1                  | ivsac.py         | $brief_sac --weighting l2
smoke | BIV+VarNetworkSAC      | Pendulum-v1                  | ivsac.py         | $brief_sac --num-nets 1
smoke | L2+VarNetworkSAC       | Pendulum-v1                  | ivsac.py         | $brief_sac --num-nets 1 --weighting l2
smoke | UWAC+VarEnsembleSAC    | Pendulum-v1                  | ivsac.py         | $brief_sac --weighting uwac
smoke | Sunrise+VarEnsembleSAC | Pendulum-v1                  | ivsac.py         | $brief_sac --weighting sunrise
smoke | IV-SAC-smoke           | paper_envs:MBBL-Hopper-v0    | ivsac.py         | $brief_sac --total-timesteps 300
"

# ============================================================================ the command line
refuse() {
  echo "benchmark.sh: $*" >&2
  exit 2
}

# check_number NAME VALUE: a limit, since bash counts wrongly beyond its 64 bits.
check_number() {
  [[ $2 =~ ^[1-9][0-9]{0,3}$ ]] || refuse "$1 takes a whole number from 1 to 9999, not '$2'"
}

suite=""
seeds=5
env_seeds=1
first_seed=""
workers=2
track=false
only=.
dry_run=false
slurm=false
sbatch_options=()
while (($#)); do
  case $1 in
    --help | -h)
      sed -n '2,/^set /{s/^# \{0,1\}//p;}' benchmark.sh
      exit 0
      ;;
    --seeds | --env-seeds | --first-seed | --workers)
      check_number "$1" "${2:-}"
      name=${1#--}
      printf -v "${name//-/_}" %s "$2"
      shift
      ;;
    --only)
      only=${2:-}
      [[ $only ]] || refuse "--only takes a regular expression"
      shift
      ;;
    --track) track=true ;;
    --dry-run) dry_run=true ;;
    --slurm)
      slurm=true
      sbatch_options=("${@:2}")
      break
      ;;
    -*) refuse "there is no option $1: see --help" ;;
    *)
      [[ ! $suite ]] || refuse "there is one suite at a time, not $suite and $1"
      suite=$1
      ;;
  esac
  shift
done
[[ $suite =~ ^($paper_suites|$other_suites|all)$ ]] || refuse "there is no suite '$suite': see --help"
((seeds * env_seeds <= 1000)) || refuse "--seeds times --env-seeds is at most 1000, not $((seeds * env_seeds))"
stop_seconds=${STOP_SECONDS:-600}
check_number STOP_SECONDS "$stop_seconds"

python=${PYTHON:-python}
runs=${RUNS_DIR:-runs}
[[ $suite != *-100k ]] || runs+=/$suite # other settings under the same names: a folder of their own
wanted=$suite
[[ $suite != all ]] || wanted=$paper_suites
if [[ ! $first_seed ]]; then
  first_seed=1
  [[ $suite != search* ]] || first_seed=101
fi

cores=$(getconf _NPROCESSORS_ONLN)
threads=$((cores > workers ? cores / workers : 1))
# shellcheck disable=SC2016 # a task of Slurm expands it
! $slurm || threads='${SLURM_CPUS_PER_TASK:-1}'
commit=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)

# ============================================================================ the list of runs
names=()
settings=() # what a run may not differ in from what it was started with
commands=()
quoted_python=$(printf %q "$python")
quoted_runs=$(printf %q "$runs")
while IFS=' |' read -r suites system env_id script arguments; do
  [[ ,$suites, =~ ,($wanted), ]] || continue
  cell=${env_id#paper_envs:}__$system
  cell_threads=$threads
  [[ $script != *dqn.py ]] || cell_threads=1
  for ((env_seed = 1; env_seed <= env_seeds; env_seed++)); do
    for ((seed = first_seed; seed < first_seed + seeds; seed++)); do
      name=${cell}__$seed
      seed_arguments="--seed $seed"
      if ((env_seeds > 1)); then
        name=${cell}__e$env_seed-$seed
        seed_arguments+=" --env-seed $env_seed"
      fi
      [[ $name =~ $only ]] || continue
      cell_settings="--env-id $env_id $seed_arguments $arguments"
      command="$quoted_python $script"
      if $track; then
        group=$suite/${cell/__//}
        command="env WANDB_RUN_GROUP=$group WANDB_TAGS=$suite,$commit WANDB_JOB_TYPE=train $command --track"
      fi
      command+=" --runs-dir $quoted_runs --run-name $name --num-threads $cell_threads $cell_settings --resume"
      names+=("$name")
      settings+=("$cell_settings")
      commands+=("$command")
    done
  done
done <<<"$cells"
((${#names[@]})) || refuse "no run of the suite $suite matches '$only'"

# For each line on the standard input, a name and perhaps its settings, the state of the run: finished, in use (by a process that
# has locked it) or unfinished. A run that was finished with other settings is unfinished: it is started, and its script refuses.
state_program='
import fcntl
import json
import sys
from pathlib import Path


def is_saved(option, value, saved):
    """Whether an argument was saved as the command line has it; value is None for --flag and --no-flag."""
    name = option.removeprefix("--").replace("-", "_")
    if value is None:
        return saved[name.removeprefix("no_")] == (not name.startswith("no_"))
    if isinstance(saved[name], (int, float)):
        return saved[name] == float(value)
    return saved[name] == value


def is_finished(folder, words):
    given = {}  # the last value of a repeated option counts
    for word, following in zip(words, [*words[1:], "--"]):
        if word.startswith("--"):
            given[word] = None if following.startswith("--") else following
    try:
        config = json.loads((folder / "config.json").read_text())
        return config["status"] == "finished" and all(is_saved(*each, config["args"]) for each in given.items())
    except (OSError, ValueError, TypeError, KeyError):
        return False


def is_in_use(folder):
    try:
        with open(folder / "metrics.jsonl") as metrics:
            fcntl.flock(metrics, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


for line in sys.stdin:
    name, *words = line.split()
    folder = Path(sys.argv[1], name)
    print("finished" if is_finished(folder, words) else "in use" if is_in_use(folder) else "unfinished")
'
run_states() (
  trap "" INT TERM # the signals are for the runs
  exec "$python" -c "$state_program" "$runs"
)

listed=$(
  for i in "${!names[@]}"; do
    echo "${names[i]} ${settings[i]}"
  done | run_states
) || refuse "PYTHON is '$python', which does not run"
mapfile -t states <<<"$listed"
todo=() # indices of the runs to start
skipped=0
in_use=0
for i in "${!names[@]}"; do
  if [[ ${states[i]} == finished ]]; then
    skipped=$((skipped + 1))
  elif $dry_run; then
    echo "${commands[i]}"
  elif [[ ${states[i]} == "in use" ]]; then
    echo "${names[i]} is in use by another process, and left to it"
    in_use=$((in_use + 1))
  else
    todo+=("$i")
  fi
done
! $dry_run || exit 0

# ============================================================================ Slurm
if $slurm; then
  command -v sbatch >/dev/null || refuse "--slurm needs sbatch, which is not here"
  ((${#todo[@]})) || echo "$suite: no run is left to submit"
  mkdir -p "$runs/slurm"
  job=""
  for ((first = 0; first < ${#todo[@]}; first += 1000)); do # Slurm's usual limit of an array; one after the other
    part=("${todo[@]:first:1000}")
    list=$runs/slurm/$suite-$(date +%Y%m%d-%H%M%S)-$$-$first.list
    for i in "${part[@]}"; do
      echo "${commands[i]}"
    done >"$list"
    options=(--parsable --job-name="iv-rl-$suite" --chdir="$PWD")
    options+=(--array="1-${#part[@]}%$workers" --requeue --open-mode=append --output="$runs/slurm/%A_%a.log")
    [[ ! $job ]] || options+=(--dependency="afterany:$job")
    job=$(
      sbatch "${options[@]}" "${sbatch_options[@]}" <<END
#!/usr/bin/env bash
eval "exec \$(sed -n "\${SLURM_ARRAY_TASK_ID}p" $(printf %q "$list"))"
END
    )
    job=${job%;*} # a federation adds its cluster
    echo "submitted ${#part[@]} runs as job $job"
  done
  exit 0
fi

# ============================================================================ this machine
declare -A running=() # process -> name of its run
failed=()
started=0
ended=0
finished=0
stop_code=0 # of the exit, once a signal has come
SECONDS=0   # bash counts on from here

stop() {
  if ((stop_code == 0)); then
    kill_at=$((SECONDS + stop_seconds))
    echo "the runs finish their episode, for at most $stop_seconds seconds; the same once more stops them at once"
  fi
  stop_code=$1
  ((${#running[@]} == 0)) || kill -TERM "${!running[@]}" 2>/dev/null || true
}
trap 'stop 130' INT
trap 'stop 143' TERM

start_next() {
  local i=${todo[started]}
  eval "exec ${commands[i]}" >>"$runs/logs/${names[i]}.log" 2>&1 &
  running[$!]=${names[i]}
  started=$((started + 1))
  ((stop_code == 0)) || kill -TERM $! 2>/dev/null || true # the signal came in between
}

clock() {
  printf '%d:%02d:%02d' $(($1 / 3600)) $(($1 / 60 % 60)) $(($1 % 60))
}

# report NAME CODE: counts and tells how a run ended.
report() {
  local name=$1 outcome state left
  state=$(run_states <<<"$name") || true
  ended=$((ended + 1))
  if [[ $state == finished && $2 == 0 ]]; then
    outcome=finished
    finished=$((finished + 1))
  elif [[ $state == "in use" ]]; then
    outcome="in use by another process"
    in_use=$((in_use + 1))
  elif ((stop_code)); then
    outcome="stopped, to be resumed"
  else
    outcome="failed with code $2"
    failed+=("$name")
  fi
  left=$((SECONDS * (${#todo[@]} - ended) / ended))
  echo "[$ended/${#todo[@]}] $name $outcome, $(clock $SECONDS) elapsed, $(clock $left) remaining"
}

mkdir -p "$runs/logs"
while ((${#running[@]} || (started < ${#todo[@]} && !stop_code))); do
  while ((${#running[@]} < workers && started < ${#todo[@]} && !stop_code)); do
    start_next
  done
  sleep 0.2 || true # a signal ends it
  if ((stop_code && SECONDS >= kill_at)); then
    kill -KILL "${!running[@]}" 2>/dev/null || true
  fi
  for process in "${!running[@]}"; do
    ! kill -0 "$process" 2>/dev/null || continue
    code=0
    wait "$process" || code=$?
    name=${running[$process]}
    unset "running[$process]"
    report "$name" "$code"
  done
done

left=$((${#names[@]} - skipped - finished - ${#failed[@]} - in_use))
echo "$suite: $finished finished, ${#failed[@]} failed, $skipped skipped, $in_use in use, $left left"
for name in "${failed[@]}"; do
  echo "failed: $name: $(tail -n 1 "$runs/logs/$name.log")"
done
((stop_code == 0)) || exit "$stop_code"
((${#failed[@]} + in_use == 0))
