//! Waiting for what another task does.

use std::time::Duration;

use tokio::time::{sleep, timeout};

/// Longer than anything takes; only a test that fails waits for it.
pub(crate) const LONG: Duration = Duration::from_secs(30);

pub(crate) async fn until(condition: impl Fn() -> bool) {
    let poll = async {
        while !condition() {
            sleep(Duration::from_millis(2)).await;
        }
    };
    timeout(LONG, poll).await.expect("it did not come to pass");
}
