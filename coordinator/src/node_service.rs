//! The gRPC service for agents: for each agent one stream of reports and directives, and one of log lines.

use std::sync::atomic::{AtomicU64, Ordering};

use baton_build_info::REVISION;
use baton_job::{
    NodeId,
    engine::{AgentRetry, Event},
    ids::Attachment,
    message::{AgentReport, Welcome},
};
use baton_proto::{
    refusal,
    v1::{self, node_service_server::NodeService},
};
use serde::Serialize;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::{Stream, StreamExt, wrappers::UnboundedReceiverStream};
use tonic::{Request, Response, Status, Streaming};

use crate::{
    job::{AgentRefusal, JobInput},
    logs::LogBuffer,
    report_limits,
    served::{CurrentJob, ServedJob, shutting_down},
};

/// Implements `NodeService`.
pub(crate) struct NodeApi {
    current: CurrentJob,
    logs: LogBuffer,
    next_attachment: AtomicU64,
}

impl NodeApi {
    pub(crate) fn new(current: CurrentJob, logs: LogBuffer) -> Self {
        Self { current, logs, next_attachment: AtomicU64::new(1) }
    }
}

type FrameStream = std::pin::Pin<Box<dyn Stream<Item = Result<v1::Frame, Status>> + Send>>;

#[tonic::async_trait]
impl NodeService for NodeApi {
    type AttachStream = FrameStream;

    async fn attach(
        &self,
        request: Request<Streaming<v1::Frame>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        let mut incoming = request.into_inner();
        let first = incoming.message().await?.ok_or_else(|| bad_hello("is missing"))?;
        first.check_version().map_err(Status::failed_precondition)?;
        let hello = match report_limits::read(&first) {
            Ok(AgentReport::Hello(hello)) => hello,
            Ok(_) => return Err(bad_hello("must be the first message")),
            Err(error) => return Err(bad_hello(&format!("is malformed: {error}"))),
        };
        report_limits::check_node_id(&hello.node).map_err(|problem| bad_hello(&problem))?;
        report_limits::check_slots(hello.slots).map_err(|problem| bad_hello(&problem))?;
        if let Some(revision) = first.other_revision(REVISION) {
            let node = &hello.node;
            tracing::warn!(
                ?node,
                revision,
                ours = REVISION,
                "another build of the same version; allowed"
            );
        }
        // While the coordinator has no job, agents wait here.
        let served = self.current.wait().await?;
        if hello.job.is_some_and(|job| job != served.job_id) {
            // It learns that its job is not served here, and is no node of this one.
            return Ok(Response::new(Box::pin(tokio_stream::once(frame(&welcome(&served))))));
        }
        let attachment = Attachment(self.next_attachment.fetch_add(1, Ordering::Relaxed));
        let node = hello.node.clone();
        let (outbox, directives) = mpsc::unbounded_channel();
        let (accepted, welcomed) = oneshot::channel();
        let hello = Box::new(hello);
        served.queue(JobInput::Attached { attachment, hello, outbox, accepted })?;

        let job = served.job.clone();
        tokio::spawn(async move {
            while let Some(Ok(frame)) = incoming.next().await {
                match report_limits::read(&frame) {
                    Ok(report) => {
                        let node = node.clone();
                        job.send(Event::Reported { node, attachment, report }.into());
                    }
                    Err(error) => {
                        tracing::warn!(%node, %error, "malformed message");
                        break;
                    }
                }
            }
            job.send(Event::Detached { node, attachment }.into());
        });
        // After the spawn: an agent that disconnects during this wait must be detached, too.
        welcomed.await.map_err(|_| shutting_down())?;

        let welcome = tokio_stream::once(frame(&welcome(&served)));
        let directives =
            UnboundedReceiverStream::new(directives).map(|directive| match directive {
                Ok(directive) => frame(&directive),
                // The agent knows by the code what to do.
                Err(AgentRefusal { reason, retry }) => Err(match retry {
                    AgentRetry::Reconnect => Status::unavailable(reason),
                    AgentRetry::Restart => Status::already_exists(reason),
                    AgentRetry::Never => Status::failed_precondition(reason),
                }),
            });
        Ok(Response::new(Box::pin(welcome.chain(directives))))
    }

    async fn ship_logs(
        &self,
        request: Request<Streaming<v1::ShipLogsRequest>>,
    ) -> Result<Response<v1::ShipLogsResponse>, Status> {
        let mut incoming = request.into_inner();
        while let Some(shipped) = incoming.message().await? {
            // The agent's id is one of a process, and shorter.
            for (field, name) in [("node_id", &shipped.node_id), ("agent", &shipped.agent)] {
                report_limits::check_node_id(&NodeId(name.clone())).map_err(|problem| {
                    let message = format!("the sender of log lines, {field}, {problem}");
                    refusal::invalid(message, [(field.to_owned(), problem)])
                })?;
            }
            self.logs.take(shipped);
        }
        Ok(Response::new(v1::ShipLogsResponse {}))
    }
}

fn bad_hello(problem: &str) -> Status {
    refusal::invalid(format!("hello {problem}"), [("hello".to_owned(), problem.to_owned())])
}

fn frame(message: &impl Serialize) -> Result<v1::Frame, Status> {
    v1::Frame::new(message).map_err(|error| Status::internal(format!("{error} in a directive")))
}

fn welcome(served: &ServedJob) -> Welcome {
    Welcome {
        job_id: served.job_id,
        recipe_json: served.spec.to_json(),
        checkpoint_location: served.store_location.clone(),
    }
}
