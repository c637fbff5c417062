//! The job that is served, and the wait for one.

use std::sync::Arc;

use baton_job::JobId;
use baton_recipe::JobSpec;
use tokio::sync::{mpsc, oneshot, watch};
use tonic::Status;

use crate::{
    job::{Handle, Input},
    metrics::Metrics,
};

/// A job that is served.
pub(crate) struct Served {
    pub(crate) job: Handle,
    pub(crate) job_id: JobId,
    pub(crate) spec: Arc<JobSpec>,
    pub(crate) store_location: String,
    pub(crate) metrics: Arc<Metrics>,
}

impl Served {
    /// Queues an input for the job's loop.
    pub(crate) fn queue(&self, input: Input) -> Result<(), Status> {
        if self.job.send(input) { Ok(()) } else { Err(shutting_down()) }
    }

    /// Queues a question for the loop and waits for its answer.
    pub(crate) async fn ask<T>(
        &self,
        input: impl FnOnce(oneshot::Sender<T>) -> Input,
    ) -> Result<T, Status> {
        let (sender, answer) = oneshot::channel();
        self.queue(input(sender))?;
        answer.await.map_err(|_| shutting_down())
    }
}

/// A job that somebody submits, and where to tell what became of it.
pub(crate) struct Submission {
    /// The recipe as it was given, and as it was understood.
    pub(crate) recipe: String,
    pub(crate) spec: JobSpec,
    pub(crate) answer: oneshot::Sender<Result<Arc<Served>, Status>>,
}

/// Where the job is, once there is one. Cheap to clone: all clones are one.
#[derive(Clone)]
pub(crate) struct JobSlot {
    served: watch::Receiver<Option<Arc<Served>>>,
    submissions: mpsc::Sender<Submission>,
}

/// The other side of a [`JobSlot`].
pub(crate) struct JobGiver {
    pub(crate) served: watch::Sender<Option<Arc<Served>>>,
    pub(crate) submissions: mpsc::Receiver<Submission>,
}

impl JobSlot {
    /// An empty one, and the other side of it.
    pub(crate) fn empty() -> (Self, JobGiver) {
        let (giver, served) = watch::channel(None);
        // One at a time: the second one finds a job.
        let (submissions, received) = mpsc::channel(1);
        (Self { served, submissions }, JobGiver { served: giver, submissions: received })
    }

    /// The job, if there is one.
    pub(crate) fn get(&self) -> Option<Arc<Served>> {
        self.served.borrow().clone()
    }

    /// The job; FAILED_PRECONDITION while there is none.
    pub(crate) fn job(&self) -> Result<Arc<Served>, Status> {
        let none = "there is no job yet: give this coordinator one with `baton submit RECIPE`";
        self.get().ok_or_else(|| Status::failed_precondition(none))
    }

    /// The job, as soon as there is one.
    pub(crate) async fn wait(&self) -> Result<Arc<Served>, Status> {
        let mut served = self.served.clone();
        let job = served.wait_for(Option::is_some).await.map_err(|_| shutting_down())?;
        job.clone().ok_or_else(shutting_down)
    }

    /// Gives it a job.
    pub(crate) async fn submit(
        &self,
        recipe: String,
        spec: JobSpec,
    ) -> Result<Arc<Served>, Status> {
        let (answer, answered) = oneshot::channel();
        // Nobody takes another once there is one.
        let sent = self.submissions.send(Submission { recipe, spec, answer }).await;
        let answer = if sent.is_ok() { answered.await.ok() } else { None };
        answer.unwrap_or_else(|| Err(self.why_no_other()))
    }

    fn why_no_other(&self) -> Status {
        match self.get() {
            Some(served) => Status::failed_precondition(format!(
                "this coordinator serves {} already: start another coordinator for another job",
                served.spec.name
            )),
            None => shutting_down(),
        }
    }
}

fn shutting_down() -> Status {
    Status::unavailable("shutting down")
}
