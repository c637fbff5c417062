//! A language model with LoRA adapters, trained on packed texts by real processes.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may fail loudly")]

#[path = "../../crates/language/tests/kit/mod.rs"]
mod models;

use baton_data::write::TextWriter;
use baton_job::exit;
use baton_proto::v1::watch_events_response::Kind;
use baton_tests::Cluster;
use models::{VOCABULARY, config_of, write_model};
use tempfile::TempDir;

/// A model, and texts of 3 to 16 tokens in which each token follows from the one before.
struct Files(TempDir);

impl Files {
    fn new() -> Self {
        let files = Self(tempfile::tempdir().unwrap());
        write_model(&files.path("model"), &config_of("gemma2"), 7);
        files.write_texts("train.beton", 0..90);
        files.write_texts("val.beton", 90..110);
        files
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.0.path().join(name)
    }

    fn write_texts(&self, name: &str, numbers: std::ops::Range<u32>) {
        let count = u64::from(numbers.end - numbers.start);
        let mut writer = TextWriter::create(&self.path(name), count).unwrap();
        for number in numbers {
            let follow = |token: u32, step: u32| (token * 3 + step * 7 + 11) % VOCABULARY;
            let mut tokens = vec![number % VOCABULARY];
            for step in 1..3 + number * 7 % 14 {
                tokens.push(follow(tokens[step as usize - 1], step));
            }
            let labels = tokens.iter().enumerate();
            let labels = labels.map(|(at, token)| if at == 0 { -100 } else { *token as i32 });
            writer.push(&tokens, &labels.collect::<Vec<_>>()).unwrap();
        }
        writer.finish().unwrap();
    }

    fn train(&self, cluster: Cluster) -> Cluster {
        cluster
            .set("model={ arch='causal_lm' }")
            .set(&format!("model.path={}", self.path("model").display()))
            .set("adapter={ rank=4, alpha=8, dropout=0.1 }")
            .set(&format!("data.train={}", self.path("train.beton").display()))
            .set(&format!("data.val={}", self.path("val.beton").display()))
            .set("data.sequence=32")
            .set("data.packing=true")
            .set("train.global_batch=8")
            .set("optimizer={ kind='adamw', weight_decay=0.01 }")
            .set("schedule={ kind='constant', lr=2e-2 }")
            .set("loss={ kind='next_token' }")
    }
}

#[tokio::test]
async fn adapters_end_with_the_same_bits_on_any_number_of_ranks() {
    let files = Files::new();
    let short = || files.train(Cluster::new()).set("train.epochs=9");
    let one = short().run_to_the_end(1).await;
    assert!(short().run_to_the_end(4).await == one, "4 ranks differ from one");

    let mut cluster = short();
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 2);
    let mut events = cluster.events().await;
    let first = events.next_of(Kind::Evaluated).await.message;
    events.next_of(Kind::Evaluated).await;
    let last = events.next_of(Kind::Evaluated).await.message;
    cluster.finish().await;
    assert!(cluster.newest_state() == one, "2 ranks differ from one");
    let loss = |message: &str| -> f64 {
        assert!(
            message.contains("perplexity ") && message.contains("token accuracy "),
            "{message}"
        );
        let loss = message.split("loss ").nth(1).and_then(|rest| rest.split([' ', ',']).next());
        loss.and_then(|loss| loss.parse().ok()).expect(message)
    };
    assert!(loss(&last) < 0.95 * loss(&first), "{first}; {last}");
    let exported = cluster.exported();
    assert_eq!(
        exported.len(),
        2 * 7 * 2,
        "two matrices for each of seven linear layers in two layers"
    );
    let name = "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight";
    assert_eq!(exported.get(name), Some(&vec![4, 40]), "{exported:?}");
}

#[tokio::test]
async fn adapters_of_a_quantised_model_continue_within_an_epoch_of_packed_texts_with_the_same_bits()
{
    let files = Files::new();
    let cluster = files.train(Cluster::endless()).set("checkpoint.every_steps=2");
    let cluster = cluster.set("adapter.base='nf4'");
    cluster.assert_same_bits_through_a_kill_and_with_other_ranks([2, 10, 16]).await;
}

#[tokio::test]
async fn another_model_cannot_continue_a_run() {
    let files = Files::new();
    let mut cluster = files.train(Cluster::endless()).set("checkpoint.every_steps=2");
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 1);
    cluster.events().await.saved_at(2).await;
    cluster.end().await;
    let before = cluster.newest_state();

    write_model(&files.path("model"), &config_of("gemma2"), 8);
    cluster.start_coordinator(&[]).await;
    cluster.start_agent("node", 1);
    let (coordinator, _) = cluster.finish().await;
    let log = cluster.log("coordinator");
    assert_eq!(coordinator.code(), Some(i32::from(exit::BAD_INPUT)), "{log}");
    assert!(log.contains("model is another one"), "{log}");
    assert!(cluster.newest_state() == before, "nothing is lost");
}
