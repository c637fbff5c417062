//! From one phase to the next: see the drawing in [`engine`](super).

use super::{
    Action, Engine, NoticeKind, Record, Recovery,
    elastic::Change,
    lifecycle::Phase,
    membership::{Kind, World},
    nodes::Node,
};
use crate::{
    exit::{Class, Failure, Outcome, crash},
    ids::{LocalRank, NodeId},
    message::{Directive, Launch},
    plan::place_ranks,
    time::Time,
};

impl Engine {
    // ---- a generation begins ----

    pub(super) fn open_if_gathering(&mut self, now: Time) {
        if matches!(self.lifecycle.phase, Phase::Gathering) {
            self.open(now);
        }
    }

    /// Opens the next generation with whoever is attached, or waits for more.
    pub(super) fn open(&mut self, now: Time) {
        // Before all hold the state, a node that must go may be the only one that does.
        let all_hold_it = self.lifecycle.training_world().is_some();
        let counts = |node: &Node| node.leaving.is_none() || !all_hold_it;
        let (slots, least) = (self.nodes.slots(counts), self.policy.min_ranks);
        // Counted before anything is placed: while thousands of nodes gather, this is asked for each.
        let placements = (slots >= least).then(|| self.nodes.offers(counts)).and_then(|offers| {
            let placements = place_ranks(&offers, least, self.policy.max_ranks)?;
            Some((offers, placements))
        });
        let Some((offers, placements)) = placements else {
            let reason = format!("waiting for agents: {slots} of at least {least} ranks are here");
            return self.lifecycle.set_phase(now, Phase::Gathering, reason);
        };
        let generation = self.lifecycle.generation.next();
        self.lifecycle.generation = generation;
        self.lifecycle.began_at = None;
        let world = World::new(placements);
        self.actions.push(Action::Persist(Record::Opened {
            generation,
            placements: world.placements().to_vec(),
        }));
        self.actions.extend(self.accounting.persist(now));
        self.actions.push(Action::Fence(generation));
        let size = world.size();
        if let Some(recovery) = self.recoveries.waiting() {
            recovery.launched_at = Some(now);
            recovery.generation = generation;
        }
        self.announce(
            NoticeKind::GenerationOpened,
            format!("generation {generation} opened with {size} ranks"),
        );
        let until = now.after(self.policy.rendezvous);
        let reason = format!("waiting for {size} ranks to start");
        self.lifecycle.set_phase(now, Phase::Forming { world, until }, reason);
        for node in self.nodes.values_mut() {
            node.warm_up = None;
        }
        let hanging = std::mem::take(&mut self.lifecycle.hanging);
        for node in offers.into_iter().map(|offer| offer.node) {
            let here = hanging.iter().filter(|(other, _)| *other == node);
            let replace: Vec<LocalRank> = here.map(|(_, local)| *local).collect();
            self.send_launch(&node, &replace);
        }
    }

    pub(super) fn send_launch(&mut self, node: &NodeId, replace: &[LocalRank]) {
        let Some(world) = self.lifecycle.world() else { return };
        let launch = Launch {
            generation: self.lifecycle.generation,
            world_size: world.size(),
            ranks: world.ranks_of(node),
            replace: replace.to_vec(),
            restore: self.restore(),
            hold: self.pauses.hold(),
        };
        self.send(node, Directive::Launch(launch));
    }

    pub(super) fn begin_when_all_ready(&mut self, now: Time) {
        let Phase::Forming { world, .. } = &mut self.lifecycle.phase else { return };
        let Some(peers) = world.begin() else { return };
        let holds_state = world.holds_state();
        if !holds_state && self.nodes.end_all_quarantines() {
            // Those who are left out may hold it.
            return self.open(now);
        }
        if let Some(drain) = self.drain.as_ref().filter(|_| !holds_state) {
            let reason = drain.reason.clone();
            return self.end(now, Outcome::Drained { reason });
        }
        let Some(world) = self.lifecycle.take_world() else { return };
        let generation = self.lifecycle.generation;
        if let Some(recovery) = self.recoveries.under_way(generation) {
            recovery.torn_down_at = world.holders_ready_at().or(recovery.launched_at);
            recovery.ready_at = Some(now);
        }
        let until = now.after(self.policy.rendezvous);
        let reason = format!("{} ranks meet and take their state", world.size());
        self.lifecycle.set_phase(now, Phase::Meeting { world, until }, reason);
        self.send_to_world(&Directive::Begin { generation, peers });
    }

    pub(super) fn train_when_all_started(&mut self, now: Time) {
        let Phase::Meeting { world, .. } = &self.lifecycle.phase else { return };
        if !world.all_have_started() {
            return;
        }
        let Some(world) = self.lifecycle.take_world() else { return };
        let reason = format!("{} ranks train", world.size());
        if let Some(recovery) = self.recoveries.under_way(self.lifecycle.generation) {
            recovery.started_at = Some(now);
        }
        self.train(now, world, reason);
    }

    fn train(&mut self, now: Time, world: World, reason: String) {
        self.lifecycle.set_phase(now, Phase::Training { world }, reason);
        self.send_drain_if_wanted(now);
        self.end_when_all_done(now);
        self.adapt(now);
    }

    // ---- it changes ----

    /// Opens a generation of other nodes, if some must go or have become ready.
    pub(super) fn adapt(&mut self, now: Time) {
        let Some(world) = self.lifecycle.training_world() else { return };
        // Who is away may have the furthest state; and what is all but done is better ended.
        let all_train = world.all_are(&[Kind::Started]);
        if self.drain.is_some() || self.nodes.away_from(world).is_some() || !all_train {
            return;
        }
        match self.nodes.change(world) {
            Some(Change::Leaves { node, reason, end }) => {
                match self.nodes.is_enough_without(&node, &self.policy) {
                    true => self.regroup(now, &reason),
                    false => self.drain(now, reason, end),
                }
            }
            Some(Change::Joins { node, ranks }) => {
                let what = if ranks == 1 { "rank" } else { "ranks" };
                let cause = format!("node {node} takes part with {ranks} {what} from here on");
                self.announce(NoticeKind::Grows, cause.clone());
                self.regroup(now, &cause);
            }
            None => {
                let until = now.after(self.policy.rendezvous);
                for (node, local_ranks) in self.nodes.begin_warm_ups(world, &self.policy, until) {
                    self.send(&node, Directive::Warm { local_ranks });
                }
            }
        }
    }

    /// Opens a generation of other nodes although nothing failed. Every rank keeps its state.
    fn regroup(&mut self, now: Time, cause: &str) {
        self.begin_recovery(now, now, cause, true);
        self.open(now);
        self.release_leaving();
    }

    fn begin_recovery(&mut self, now: Time, lost_at: Time, cause: &str, planned: bool) {
        let (meter, spent) = (&self.accounting.meter, self.accounting.spent(now));
        self.actions.extend(self.recoveries.abandon(spent));
        // The first word of it may be older than this moment.
        let metered_from = meter.read(lost_at).min(spent);
        let step = self.results.reached;
        let recovery = Recovery::new(self.lifecycle.generation, cause, lost_at, step);
        self.recoveries.begin(Recovery { planned, metered_from, ..recovery });
    }

    // ---- it is lost ----

    /// No rank of `world` goes on; waits for news of who is missing.
    pub(super) fn wait_for_losses(
        &mut self,
        now: Time,
        world: World,
        (until, lost_at): (Time, Time),
        failure: Failure,
        otherwise: &str,
    ) {
        let reason = match self.nodes.away_from(&world) {
            Some(node) => format!("{failure}; waiting for node {node}, which is away"),
            None => format!("{failure}{otherwise}"),
        };
        let phase = Phase::Settling { world, until, lost_at, failure };
        self.lifecycle.set_phase(now, phase, reason);
        self.fail_when_losses_are_known(now);
    }

    /// Goes on once it is known who is missing, or enough time has passed.
    pub(super) fn fail_when_losses_are_known(&mut self, now: Time) {
        let Phase::Settling { world, until, lost_at, failure } = &self.lifecycle.phase else {
            return;
        };
        // If all lost touch, nobody is missing and nobody's death will be reported.
        let known = world.has(Kind::Gone) || world.all_are(&[Kind::Lost]);
        if self.nodes.away_from(world).is_none() && (known || *until <= now) {
            let (lost_at, failure) = (*lost_at, failure.clone());
            self.fail(now, lost_at, failure);
        }
    }

    /// Ranks that did not come as far as the others in time keep them waiting.
    pub(super) fn fail_late(&mut self, now: Time) {
        let (Phase::Forming { world, .. } | Phase::Meeting { world, .. }) = &self.lifecycle.phase
        else {
            return;
        };
        let late = world.late();
        let names: Vec<String> = late.iter().map(|place| place.rank.to_string()).collect();
        let seconds = self.policy.rendezvous.as_secs_f64();
        let cause = format!("rank {} did not meet the others in {seconds} s", names.join(", "));
        // Who answers and holds state gets another chance: perhaps it waited for the others.
        let hanging = late.into_iter().filter(|place| !world.holds_state_at(place.rank));
        self.lifecycle.hanging =
            hanging.map(|place| (place.node.clone(), place.local_rank)).collect();
        self.fail(now, now, crash(cause));
    }

    /// The present generation is over, as was first heard at `lost_at`: a new one, a pause before it, or the end.
    fn fail(&mut self, now: Time, lost_at: Time, failure: Failure) {
        let generation = self.lifecycle.generation;
        if self.divergences.is_rollback_due(generation) {
            // What ended it was no failure.
            return self.open(now);
        }
        self.lifecycle.failures += 1;
        let (failures, limit) = (self.lifecycle.failures, self.policy.restart_limit);
        if failures > limit {
            let message = format!(
                "{failures} generations ended without a new step, the last because {}",
                failure.message
            );
            return self.end(now, Outcome::Failed { failure: Failure { message, ..failure } });
        }
        self.begin_recovery(now, lost_at, &failure.message, false);
        self.quarantine_failing_nodes(now);
        let until = now.after(self.policy.backoff(failures, self.origin.job, generation));
        if until <= now || self.drain.is_some() {
            return self.open(now);
        }
        let reason = format!("pausing before restart {failures} of {limit}: {failure}");
        self.lifecycle.set_phase(now, Phase::Backoff { until }, reason);
    }

    /// Leaves out nodes that failed too often, while the others are enough and lose nothing by it.
    fn quarantine_failing_nodes(&mut self, now: Time) {
        let Phase::Settling { world, .. } = &self.lifecycle.phase else { return };
        for node in self.nodes.failing(world) {
            if self.nodes.is_enough_without(&node, &self.policy) {
                self.quarantine(now, &node);
            }
        }
    }

    pub(super) fn quarantine(&mut self, now: Time, node: &NodeId) {
        if let Some(text) = self.nodes.quarantine(now, node) {
            self.announce(NoticeKind::NodeRests, text);
        }
    }

    // ---- the coordinator was restarted ----

    pub(super) fn finish_reattaching(&mut self, now: Time) {
        let Phase::Reattaching { world, .. } = &self.lifecycle.phase else { return };
        if !world.has(Kind::Unheard) {
            self.give_up_reattaching(now);
        }
    }

    pub(super) fn give_up_reattaching(&mut self, now: Time) {
        let Phase::Reattaching { lost_at, .. } = self.lifecycle.phase else { return };
        let Some(world) = self.lifecycle.take_world() else { return };
        let is_rollback_due = self.divergences.is_rollback_due(self.lifecycle.generation);
        if world.all_have_started() && !is_rollback_due {
            let reason = format!(
                "{} ranks train; they went on while the coordinator was away",
                world.size()
            );
            return self.train(now, world, reason);
        }
        let cause = "the coordinator restarted and not all ranks are still there".to_owned();
        let failure = crash(cause.clone());
        let lost_at = lost_at.unwrap_or(now);
        let phase = Phase::Settling { world, until: now, lost_at, failure };
        self.lifecycle.set_phase(now, phase, cause);
        self.fail_when_losses_are_known(now);
    }

    // ---- the end ----

    pub(super) fn end_when_all_done(&mut self, now: Time) {
        let Some(outcome) = self.lifecycle.world().and_then(World::outcome) else { return };
        self.end(now, outcome);
    }

    pub(super) fn end(&mut self, now: Time, outcome: Outcome) {
        if self.outcome().is_some() {
            return;
        }
        let outcome = self.accounting.limited(now, outcome);
        self.end_pause(now);
        self.drain = None;
        self.actions.extend(self.recoveries.abandon(self.accounting.spent(now)));
        self.actions.extend(self.accounting.persist(now));
        self.actions.push(Action::Persist(Record::Ended(outcome.clone())));
        self.announce(NoticeKind::Ended, format!("job {outcome}"));
        let reason = outcome.to_string();
        self.lifecycle.set_phase(now, Phase::Ended { outcome: outcome.clone() }, reason);
        let nodes: Vec<NodeId> = self.nodes.keys().cloned().collect();
        for node in nodes {
            self.send(&node, Directive::Dismiss { outcome: outcome.clone() });
        }
    }

    /// Nothing that it does can be saved any more.
    pub(super) fn taken_over(&mut self, now: Time, message: String) {
        self.end(now, Outcome::Failed { failure: Failure { class: Class::TakenOver, message } });
    }
}
