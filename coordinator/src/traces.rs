//! The job's life as OpenTelemetry traces, for those who gather such elsewhere.
//!
//! A thread of the SDK's own sends them; what the collector does not take is lost, and training never waits.

mod timeline;

use std::{
    fmt,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use baton_job::{Time, engine::Record};
use opentelemetry::KeyValue;
use opentelemetry_otlp::{
    ExporterBuildError, WithExportConfig, WithTonicConfig, tonic_types::transport::ClientTlsConfig,
};
use opentelemetry_sdk::{
    Resource,
    error::{OTelSdkError, OTelSdkResult},
    trace::{BatchSpanProcessor, SpanData, SpanExporter, SpanProcessor},
};
pub(crate) use timeline::Timeline;
use tracing::{info, warn};

use crate::journal::LoggedEvent;

/// How long the end of a job waits for the collector.
const PATIENCE: Duration = Duration::from_secs(3);

/// Where a job's spans go.
#[derive(Debug)]
pub(crate) struct Traces {
    timeline: Timeline,
    processor: BatchSpanProcessor,
}

impl Traces {
    /// Sends what `timeline` tells to an OTLP collector that speaks gRPC. To be called in a tokio runtime.
    ///
    /// # Errors
    /// If that is no address. Nobody needs to be there.
    pub(crate) fn to(endpoint: &str, timeline: Timeline) -> Result<Self, ExporterBuildError> {
        let exporter =
            opentelemetry_otlp::SpanExporter::builder().with_tonic().with_endpoint(endpoint);
        // Not where nobody asks for it: a machine may have no certificates to trust.
        let exporter = match endpoint.starts_with("https:") {
            true => exporter.with_tls_config(ClientTlsConfig::new().with_enabled_roots()),
            false => exporter,
        };
        let exporter = exporter.build()?;
        let exporter =
            Loud { exporter, endpoint: endpoint.to_owned(), fails: AtomicBool::new(false) };
        let mut processor = BatchSpanProcessor::builder(exporter).build();
        // `OTEL_RESOURCE_ATTRIBUTES` and `OTEL_SERVICE_NAME` come first.
        let about = [
            KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
            KeyValue::new("baton.job.id", timeline.job().to_string()),
        ];
        let resource = Resource::builder().with_attributes(about);
        let resource = match std::env::var_os("OTEL_SERVICE_NAME") {
            Some(_) => resource,
            None => resource.with_service_name("baton"),
        };
        processor.set_resource(&resource.build());
        info!(endpoint, trace_id = %timeline.trace_id(), "traces are sent");
        Ok(Self { timeline, processor })
    }

    /// Takes what the machine remembers.
    pub(crate) fn record(&mut self, now: Time, record: &Record) {
        for span in self.timeline.record(now, record) {
            self.processor.on_end(span);
        }
    }

    /// Takes what people are told.
    pub(crate) fn event(&mut self, event: &LoggedEvent) {
        self.timeline.event(event);
    }
}

impl Drop for Traces {
    fn drop(&mut self) {
        // Other errors were told by the exporter.
        if let Err(OTelSdkError::Timeout(after)) = self.processor.shutdown_with_timeout(PATIENCE) {
            warn!(
                "--otlp-endpoint: the last traces are lost: they were not taken within {after:?}"
            );
        }
    }
}

/// An exporter that tells people when its collector begins to fail, and when it is well again.
struct Loud {
    exporter: opentelemetry_otlp::SpanExporter,
    endpoint: String,
    fails: AtomicBool,
}

impl SpanExporter for Loud {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let result = self.exporter.export(batch).await;
        let endpoint = &self.endpoint;
        match (&result, self.fails.swap(result.is_err(), Ordering::Relaxed)) {
            (Err(error), false) => warn!(
                "--otlp-endpoint {endpoint}: traces are lost until it takes them: {error}; is a collector there \
                 that speaks gRPC (port 4317, not 4318)?"
            ),
            (Ok(()), true) => info!("--otlp-endpoint {endpoint}: traces are taken again"),
            (Err(_), true) | (Ok(()), false) => {}
        }
        result
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.exporter.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}

impl fmt::Debug for Loud {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loud").field("endpoint", &self.endpoint).finish_non_exhaustive()
    }
}
