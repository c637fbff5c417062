//! Strikes the faults of a history, one after the other, and waits until each has had its effect.

use std::time::Instant;

use baton_fake_s3::Fault as StoreFault;
use baton_job::exit;
use baton_proto::v1::{
    GetStatusRequest, GetStatusResponse, TriggerCheckpointRequest, get_status_response::Phase,
};
use baton_tests::{kill, stop, terminate, wake};

use crate::{
    fault::{Fault, HOSTS, Kind},
    namespaces::{address, ip},
    world::{Outcome, World, traffic_control},
};

/// Ranks of the hosts; the numbers change from run to run.
const WORLDS: [[u32; HOSTS]; 3] = [[1, 1, 1], [1, 2, 1], [1, 1, 2]];
/// Steps that are made while a link or the store is disturbed.
const DISTURBED_STEPS: u64 = 2;
/// Steps between saves, as in the recipe.
const SAVED_EVERY: u64 = 20;
/// A clock is moved by this for each host.
const CLOCK_SECONDS: [i64; HOSTS] = [-400, 500, 700];

/// Plays a history to the end of the epoch that it comes to.
pub(crate) async fn run(recipe: &str, faults: &[Fault]) -> Outcome {
    let mut world = World::start(recipe, WORLDS[0]).await;
    let start = Instant::now();
    let mut generation = 0;
    for (number, fault) in faults.iter().enumerate() {
        let (now, step) = world.all_train(generation).await;
        world.replaced_coordinator_ends().await;
        // A fault comes at any moment of a step.
        tokio::time::sleep(fault.after).await;
        let (number, seconds) = (number + 1, start.elapsed().as_secs_f64());
        println!("{number}: {fault} at step {step} of generation {now}, after {seconds:.1} s");
        generation = strike(&mut world, *fault, now).await;
    }
    world.all_train(generation).await;
    world.replaced_coordinator_ends().await;
    world.complete().await
}

/// Strikes a fault and waits for its effect. All ranks train again in a generation after the returned one.
async fn strike(world: &mut World, Fault { kind, host, after }: Fault, generation: u64) -> u64 {
    match kind {
        Kind::RankKilled => {
            kill(world.rank_pid(host).await);
            generation
        }
        Kind::RankStopped => {
            stop(world.rank_pid(host).await);
            generation
        }
        Kind::AgentKilled => {
            world.kill_agent(host).await;
            world.start_agent(host);
            generation
        }
        Kind::AgentStopped => {
            let agent = world.agent_pid(host);
            stop(agent);
            noticed(world, generation).await;
            wake(agent);
            generation
        }
        Kind::CoordinatorKilled => {
            let lease = lease_number(world).await;
            let (pid, is_first) = world.coordinator().await;
            if is_first {
                world.kill_first_coordinator(None).await;
            } else {
                kill(pid);
            }
            replaced(world, lease).await;
            0
        }
        Kind::CoordinatorStopped => {
            let lease = lease_number(world).await;
            let (pid, _) = world.coordinator().await;
            stop(pid);
            replaced(world, lease).await;
            wake(pid);
            0
        }
        Kind::HostFrozen => {
            let lease = lease_number(world).await;
            let serves = world.serves(host).await;
            let frozen = world.processes(host);
            frozen.iter().copied().for_each(stop);
            if serves {
                replaced(world, lease).await;
            }
            noticed(world, generation).await;
            frozen.iter().copied().for_each(wake);
            generation
        }
        Kind::HostDestroyed => {
            ip(&format!("link set v{host} down"));
            world.kill_first_coordinator(Some(host)).await;
            world.kill_agent(host).await;
            world.wipe(host);
            noticed(world, generation).await;
            ip(&format!("link set v{host} up"));
            world.start_agent(host);
            generation
        }
        Kind::HostCut => {
            ip(&format!("link set v{host} down"));
            noticed(world, generation).await;
            ip(&format!("link set v{host} up"));
            generation
        }
        Kind::OneWay => {
            let route = format!("blackhole {}/32", address(host % HOSTS + 1));
            ip(&format!("-n n{host} route add {route}"));
            noticed(world, generation).await;
            ip(&format!("-n n{host} route del {route}"));
            generation
        }
        Kind::LinkSlow => {
            shaped(world, host, "rate 100mbit burst 32kbit latency 400ms", "overlimits").await
        }
        Kind::LinkLossy => {
            shaped(world, host, "rate 400mbit burst 32kbit limit 20000", "dropped").await
        }
        Kind::DiskFull => {
            world.fill(host);
            kill(world.rank_pid(host).await);
            noticed(world, generation).await;
            world.make_room(host);
            generation
        }
        Kind::DiskReadOnly => {
            world.kill_agent(host).await;
            world.set_read_only(host, true);
            world.start_agent(host);
            let refused = world.agent_ends(host).await;
            assert_eq!(refused.code(), Some(i32::from(exit::BAD_INPUT)), "{}", world.tail());
            world.set_read_only(host, false);
            world.start_agent(host);
            generation
        }
        Kind::StoreFails => store_disturbed(world, StoreFault::Internal, 2).await,
        Kind::StoreStalls => store_disturbed(world, StoreFault::Delayed, 1).await,
        Kind::StoreDamages => {
            // Another one must be there: a job whose only checkpoint is damaged does not begin anew.
            for count in 1..=2 {
                let asked = TriggerCheckpointRequest {};
                world.connect().await.trigger_checkpoint(asked).await.unwrap();
                let saved = async || (world.checkpoints().await.len() >= count).then_some(());
                world.until("a checkpoint", saved).await;
            }
            world.kill_all().await;
            world.lose_local_disks();
            let newest = world.checkpoints().await[0].name().to_string();
            let objects = world.server.objects();
            let shard = objects
                .iter()
                .filter(|(key, _)| key.contains(&newest))
                .max_by_key(|(_, size)| *size);
            world.server.damage(&shard.unwrap().0);
            world.start_all(host).await;
            let look =
                async || world.status().await?.began_with.filter(|with| with.contains(&newest));
            let began = world.until("the damaged checkpoint is skipped", look).await;
            assert!(began.contains("SKIPPED"), "{began}");
            0
        }
        Kind::Notice => {
            terminate(world.agent_pid(host));
            // If it serves the job, another one takes over.
            let left = world.agent_ends(host).await;
            assert_eq!(left.code(), Some(i32::from(exit::DRAINED)), "{}", world.tail());
            noticed(world, generation).await;
            world.start_agent(host);
            generation
        }
        Kind::AllNoticed => {
            let step = world.until("the step is known", async || steps(world).await).await;
            for other in 0..HOSTS {
                terminate(world.agent_pid((host - 1 + other) % HOSTS + 1));
                tokio::time::sleep(after / 20).await;
            }
            world.all_drained().await;
            let saved = world.checkpoints().await[0].progress.step.0;
            assert!(saved >= step, "step {step} is lost: step {saved} is saved\n{}", world.tail());
            world.start_all(host).await;
            generation
        }
        Kind::ClockJumps => {
            world.move_clock(host, CLOCK_SECONDS[host - 1]);
            let read = async || (world.clock_reads(host) > 5).then_some(());
            world.until("the moved clock is read", read).await;
            0
        }
        Kind::AllKilled => {
            world.kill_all().await;
            world.start_all(host).await;
            generation
        }
        Kind::WorldChanged => {
            world.drain().await;
            let next = WORLDS.into_iter().find(|ranks| ranks[host - 1] == 2).unwrap_or(WORLDS[0]);
            world.set_ranks(next);
            world.start_all(host).await;
            generation
        }
    }
}

async fn lease_number(world: &World) -> u64 {
    world.until("a lease", async || world.lease().await).await.number
}

/// Waits until another coordinator has a lease.
async fn replaced(world: &World, lease: u64) {
    let look = async || world.lease().await.filter(|newest| newest.number > lease);
    world.until("another coordinator takes over", look).await;
}

/// Waits until training is interrupted, or was.
async fn noticed(world: &World, generation: u64) {
    let is_noticed = |status: GetStatusResponse| {
        status.generation > generation || status.phase() != Phase::Training
    };
    let look = async || world.status().await.filter(|status| is_noticed(status.clone()));
    world.until("the fault is noticed", look).await;
}

/// The number of steps made; `None` while no coordinator answers.
async fn steps(world: &World) -> Option<u64> {
    Some(world.status().await?.latest?.step)
}

/// Waits for more steps, or for an interruption.
async fn steps_are_made(world: &World, generation: u64) {
    let first = world.until("the step is known", async || steps(world).await).await;
    let look = async || {
        let status = world.status().await?;
        let made = status.latest.as_ref()?.step;
        (made >= first + DISTURBED_STEPS || status.generation > generation).then_some(())
    };
    world.until("steps are made meanwhile", look).await;
}

/// Limits what a host sends, until the kernel has counted that and steps were made.
async fn shaped(world: &World, host: usize, limits: &str, counter: &str) -> u64 {
    traffic_control(host, &format!("qdisc add dev e{host} root tbf {limits}"));
    let counted = async || {
        let statistics = traffic_control(host, &format!("-s qdisc show dev e{host}"));
        let words: Vec<_> = statistics.split(|c: char| !c.is_alphanumeric()).collect();
        let at = words.iter().position(|word| *word == counter).unwrap();
        words[at + 1].parse::<u64>().ok().filter(|count| *count > 10)
    };
    world.until(&format!("packets are {counter}"), counted).await;
    let generation =
        world.until("a generation", async || Some(world.status().await?.generation)).await;
    steps_are_made(world, generation).await;
    traffic_control(host, &format!("qdisc del dev e{host} root"));
    0
}

/// Disturbs the store during a save, until requests were struck and steps were made.
async fn store_disturbed(world: &World, fault: StoreFault, every: usize) -> u64 {
    let mut client = world.connect().await;
    let generation =
        world.until("a generation", async || Some(world.status().await?.generation)).await;
    // Training waits if a save is due while another one is in flight, here the one that is triggered.
    let early = async || (steps(world).await? % SAVED_EVERY < SAVED_EVERY / 2).then_some(());
    world.until("the next save is far", early).await;
    let before = world.server.struck();
    world.server.faults(fault, every);
    let _ = client.trigger_checkpoint(TriggerCheckpointRequest {}).await;
    let struck = async || (world.server.struck() >= before + 3).then_some(());
    world.until("requests are struck", struck).await;
    // The lease cannot be read now, so the coordinator is asked that was known before.
    let mut made = Vec::new();
    let look = async || {
        let status = client.get_status(GetStatusRequest {}).await.ok()?.into_inner();
        made.push(status.latest.as_ref()?.step);
        (made.last() >= Some(&(made[0] + DISTURBED_STEPS)) || status.generation > generation)
            .then_some(())
    };
    world.until("steps are made without the store", look).await;
    world.server.recovers();
    0
}
