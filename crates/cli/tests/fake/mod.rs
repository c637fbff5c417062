//! A coordinator that tells what a test, or an example, lets it tell.

use std::{
    net::SocketAddr,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard},
};

use baton_proto::v1::{
    DrainRequest, DrainResponse, GetRecipeRequest, GetRecipeResponse, GetStatusRequest,
    GetStatusResponse, ListCheckpointsRequest, ListCheckpointsResponse, PauseRequest,
    PauseResponse, ResumeRequest, ResumeResponse, StopRequest, StopResponse, StreamLogsRequest,
    StreamLogsResponse, StreamMetricsRequest, StreamMetricsResponse, SubmitJobRequest,
    SubmitJobResponse, TriggerCheckpointRequest, TriggerCheckpointResponse, WatchEventsRequest,
    WatchEventsResponse,
    job_service_server::{JobService, JobServiceServer},
};
use tokio::{
    net::TcpListener,
    runtime::Runtime,
    sync::{mpsc, watch},
};
use tokio_stream::{Stream, wrappers::ReceiverStream, wrappers::TcpListenerStream};
use tonic::{Request, Response, Status, transport::Server};

/// What it tells, and what it was asked for.
#[derive(Default)]
pub(crate) struct Told {
    pub(crate) status: GetStatusResponse,
    pub(crate) events: Vec<WatchEventsResponse>,
    pub(crate) points: Vec<StreamMetricsResponse>,
    pub(crate) lines: Vec<StreamLogsResponse>,
    pub(crate) recipe: GetRecipeResponse,
    /// Why it refuses what would change the job.
    pub(crate) refusal: Option<Status>,
    /// Calls that would change the job.
    pub(crate) asked: Vec<String>,
}

/// A fake coordinator; it is gone when it is dropped.
pub(crate) struct Fake {
    told: Shared,
    address: SocketAddr,
    _runtime: Runtime,
}

#[derive(Clone)]
struct Shared {
    told: Arc<Mutex<Told>>,
    changed: watch::Sender<()>,
}

impl Fake {
    /// On a free port.
    pub(crate) fn start(told: Told) -> Self {
        Self::start_at("127.0.0.1:0".parse().unwrap(), told)
    }

    /// Where another one was, perhaps.
    pub(crate) fn start_at(address: SocketAddr, told: Told) -> Self {
        let threads = &mut tokio::runtime::Builder::new_multi_thread();
        let runtime = threads.worker_threads(1).enable_all().build().unwrap();
        let told = Shared { told: Arc::new(Mutex::new(told)), changed: watch::Sender::new(()) };
        let listener = runtime.block_on(TcpListener::bind(address)).unwrap();
        let address = listener.local_addr().unwrap();
        let service = JobServiceServer::new(told.clone());
        let incoming = TcpListenerStream::new(listener);
        runtime.spawn(Server::builder().add_service(service).serve_with_incoming(incoming));
        Self { told, address, _runtime: runtime }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Changes what it tells; who follows hears of it.
    pub(crate) fn tell(&self, change: impl FnOnce(&mut Told)) {
        change(&mut self.told.lock());
        self.told.changed.send_replace(());
    }

    /// What it was asked for.
    pub(crate) fn asked(&self) -> Vec<String> {
        self.told.lock().asked.clone()
    }
}

type Items<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap()
    }

    fn ask(&self, what: String) -> Result<(), Status> {
        let mut told = self.lock();
        told.asked.push(what);
        told.refusal.clone().map_or(Ok(()), Err)
    }

    /// Items of a list from number `first`, and if so asked those that are added to it.
    fn items<T: Clone + Send + Sync + 'static>(
        &self,
        mut first: usize,
        follow: bool,
        list: impl Fn(&Told) -> &Vec<T> + Send + Sync + 'static,
        wanted: impl Fn(&T) -> bool + Send + Sync + 'static,
    ) -> Response<Items<T>> {
        let (sender, items) = mpsc::channel(16);
        let shared = self.clone();
        tokio::spawn(async move {
            let mut changed = shared.changed.subscribe();
            loop {
                let new: Vec<T> = list(&shared.lock()).get(first..).unwrap_or_default().to_vec();
                first += new.len();
                for item in new.into_iter().filter(&wanted) {
                    if sender.send(Ok(item)).await.is_err() {
                        return;
                    }
                }
                if !follow || changed.changed().await.is_err() {
                    return;
                }
            }
        });
        Response::new(Box::pin(ReceiverStream::new(items)))
    }
}

type Answer<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl JobService for Shared {
    type WatchEventsStream = Items<WatchEventsResponse>;
    type StreamMetricsStream = Items<StreamMetricsResponse>;
    type StreamLogsStream = Items<StreamLogsResponse>;

    async fn get_status(&self, _: Request<GetStatusRequest>) -> Answer<GetStatusResponse> {
        Ok(Response::new(self.lock().status.clone()))
    }

    async fn watch_events(
        &self,
        request: Request<WatchEventsRequest>,
    ) -> Answer<Self::WatchEventsStream> {
        let WatchEventsRequest { after_id, past_only } = request.into_inner();
        Ok(self.items(0, !past_only, |told| &told.events, move |event| event.id > after_id))
    }

    async fn drain(&self, request: Request<DrainRequest>) -> Answer<DrainResponse> {
        self.ask(format!("drain: {}", request.into_inner().reason))?;
        Ok(Response::new(DrainResponse {}))
    }

    async fn trigger_checkpoint(
        &self,
        _: Request<TriggerCheckpointRequest>,
    ) -> Answer<TriggerCheckpointResponse> {
        self.ask("checkpoint".to_owned())?;
        Ok(Response::new(TriggerCheckpointResponse {}))
    }

    async fn stop(&self, _: Request<StopRequest>) -> Answer<StopResponse> {
        self.ask("stop".to_owned())?;
        Ok(Response::new(StopResponse {}))
    }

    async fn pause(&self, request: Request<PauseRequest>) -> Answer<PauseResponse> {
        self.ask(format!("pause: {}", request.into_inner().reason))?;
        Ok(Response::new(PauseResponse {}))
    }

    async fn resume(&self, _: Request<ResumeRequest>) -> Answer<ResumeResponse> {
        self.ask("resume".to_owned())?;
        Ok(Response::new(ResumeResponse {}))
    }

    async fn list_checkpoints(
        &self,
        _: Request<ListCheckpointsRequest>,
    ) -> Answer<ListCheckpointsResponse> {
        Ok(Response::new(ListCheckpointsResponse::default()))
    }

    async fn stream_metrics(
        &self,
        request: Request<StreamMetricsRequest>,
    ) -> Answer<Self::StreamMetricsStream> {
        let StreamMetricsRequest { after_unix_millis, follow } = request.into_inner();
        let is_later = move |point: &StreamMetricsResponse| point.unix_millis > after_unix_millis;
        Ok(self.items(0, follow, |told| &told.points, is_later))
    }

    async fn stream_logs(
        &self,
        request: Request<StreamLogsRequest>,
    ) -> Answer<Self::StreamLogsStream> {
        let StreamLogsRequest { ranks, all_sources, tail, follow } = request.into_inner();
        let is_wanted = move |line: &StreamLogsResponse| match line.rank {
            Some(rank) => ranks.is_empty() || ranks.contains(&rank),
            None => all_sources,
        };
        let first = match tail {
            0 => 0,
            // As many as are wanted, counted from the end.
            tail => {
                let lines = &self.lock().lines;
                let wanted = (0..lines.len()).rev().filter(|&number| is_wanted(&lines[number]));
                wanted.take(tail as usize).last().unwrap_or(lines.len())
            }
        };
        Ok(self.items(first, follow, |told| &told.lines, is_wanted))
    }

    async fn get_recipe(&self, _: Request<GetRecipeRequest>) -> Answer<GetRecipeResponse> {
        Ok(Response::new(self.lock().recipe.clone()))
    }

    async fn submit_job(&self, request: Request<SubmitJobRequest>) -> Answer<SubmitJobResponse> {
        let SubmitJobRequest { recipe, overrides } = request.into_inner();
        self.ask(format!("submit {overrides:?}: {recipe}"))?;
        Ok(Response::new(SubmitJobResponse { job_id: "5f0c8d5e".into(), name: "demo".into() }))
    }
}
