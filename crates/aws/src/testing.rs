//! AWS as a test wants it: answers in the order in which they are asked for.

use std::{cell::RefCell, collections::VecDeque, fs, path::Path};

use baton_job::exit::Failure;
use serde_json::{Value, json};

use crate::{
    api::{Api, Error},
    stack::Stack,
};

/// What one call gets.
struct Turn {
    /// What its arguments, joined by spaces, have in them.
    call: String,
    answer: Result<Vec<u8>, Error>,
    /// A file that it leaves in the folder that is its last argument.
    file: Option<(String, Vec<u8>)>,
}

/// Calls that are expected, one after the other.
#[derive(Default)]
pub(super) struct Script {
    turns: RefCell<VecDeque<Turn>>,
    called: RefCell<Vec<String>>,
}

impl Script {
    pub(super) fn new() -> Self {
        Self::default()
    }

    pub(super) fn answer(self, call: &str, answer: Value) -> Self {
        let text = if answer.is_null() { String::new() } else { answer.to_string() };
        self.bytes(call, text.as_bytes())
    }

    pub(super) fn bytes(self, call: &str, answer: &[u8]) -> Self {
        self.turn(call, Ok(answer.to_owned()))
    }

    /// A call that leaves a file in the folder that is its last argument.
    pub(super) fn file(self, call: &str, name: &str, text: &[u8]) -> Self {
        let script = self.bytes(call, b"");
        if let Some(turn) = script.turns.borrow_mut().back_mut() {
            turn.file = Some((name.to_owned(), text.to_owned()));
        }
        script
    }

    pub(super) fn error(self, call: &str, code: &str, message: &str) -> Self {
        self.turn(call, Err(error(call, code, message)))
    }

    fn turn(self, call: &str, answer: Result<Vec<u8>, Error>) -> Self {
        self.turns.borrow_mut().push_back(Turn { call: call.to_owned(), answer, file: None });
        self
    }

    /// How many answers there are.
    pub(super) fn len(&self) -> usize {
        self.turns.borrow().len()
    }

    /// From this call on, only an error.
    pub(super) fn breaking_at(self, index: usize, code: &str) -> (Self, String) {
        let mut turns = self.turns.borrow_mut();
        turns.truncate(index + 1);
        let turn = &mut turns[index];
        turn.answer = Err(error(&turn.call, code, "because of a test"));
        let call = turn.call.clone();
        drop(turns);
        (self, call)
    }

    /// All calls so far.
    pub(super) fn called(&self) -> Vec<String> {
        self.called.borrow().clone()
    }
}

fn error(call: &str, code: &str, message: &str) -> Error {
    Error::parse(
        &format!("An error occurred ({code}) when calling the {call} operation: {message}"),
        &[],
    )
}

impl Api for Script {
    fn call(&self, arguments: &[&str]) -> Result<Vec<u8>, Error> {
        let call = arguments.join(" ");
        self.called.borrow_mut().push(call.clone());
        let turn = self.turns.borrow_mut().pop_front();
        let turn =
            turn.unwrap_or_else(|| panic!("nobody expects: {}", &call[..call.len().min(200)]));
        assert!(
            call.contains(&turn.call),
            "expected {}, not: {}",
            turn.call,
            &call[..call.len().min(200)]
        );
        if let (Some((name, text)), Some(folder)) = (turn.file, arguments.last()) {
            let file = Path::new(folder).join(name);
            file.parent().map(fs::create_dir_all).transpose().unwrap();
            fs::write(file, text).unwrap();
        }
        turn.answer
    }
}

/// Lets each call of a script fail in its turn: what was run ends with one line that names the call, and a remedy.
pub(super) fn break_each<T>(
    script: impl Fn() -> Script,
    run: impl Fn(&Script) -> Result<T, Failure>,
) {
    for index in 0..script().len() {
        let (api, call) = script().breaking_at(index, "AccessDenied");
        let Err(Failure { message, .. }) = run(&api) else { panic!("{call} failed unheard") };
        let is_told = message.contains(&call) && message.contains("deploy/aws/README.md");
        assert!(is_told && !message.contains('\n'), "{call}: {message}");
    }
}

/// The only job of a region, looked for without its name.
pub(super) fn launched(nodes: &str) -> Script {
    let parameters = [("Bucket", "bucket"), ("Job", "digits"), ("Nodes", nodes)];
    let stacks = || json!({"Stacks": [stack("CREATE_COMPLETE", &parameters)]});
    Script::new()
        .answer("describe-stacks", stacks())
        .answer("describe-stacks --stack-name baton-digits", stacks())
}

/// A stack as AWS tells of it.
pub(super) fn stack(status: &str, parameters: &[(&str, &str)]) -> Value {
    let parameters: Vec<Value> = parameters
        .iter()
        .map(|(key, value)| json!({"ParameterKey": key, "ParameterValue": value}))
        .collect();
    json!({"StackName": "baton-digits", "StackStatus": status, "Parameters": parameters, "Tags": [{"Key": "baton:job", "Value": "digits"}]})
}

/// The stack of a job on so many nodes.
pub(super) fn stack_of(nodes: &str) -> Stack {
    Stack {
        status: "CREATE_COMPLETE".to_owned(),
        parameters: [
            ("Bucket", "bucket"),
            ("Job", "digits"),
            ("Nodes", nodes),
            ("InstanceType", "p4d.24xlarge"),
        ]
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .into(),
        outputs: [].into(),
    }
}

/// What a look at the group and its machines gets.
pub(super) fn fleet_answers(script: Script, wanted: u64, instances: &[&str]) -> Script {
    let members: Vec<Value> = instances
        .iter()
        .map(|id| json!({"InstanceId": id, "LifecycleState": "InService"}))
        .collect();
    let machines: Vec<Value> = instances
        .iter()
        .map(|id| {
            json!({"InstanceId": id, "InstanceType": "p4d.24xlarge", "LaunchTime": "2026-11-22T09:00:00Z", "State": {"Name": "running"},
                "Placement": {"AvailabilityZone": "us-east-1a"}, "Tags": [{"Key": "aws:autoscaling:groupName", "Value": "baton-digits"}]})
        })
        .collect();
    script
        .answer(
            "describe-auto-scaling-groups",
            json!({"AutoScalingGroups": [{"DesiredCapacity": wanted, "Instances": members}]}),
        )
        .answer("describe-instances", json!({"Reservations": [{"Instances": machines}]}))
}

/// What a look at all that machines have told gets.
pub(super) fn told_answers(script: Script) -> Script {
    let object =
        json!({"Key": "digits/machines/i-1/status.json", "LastModified": "2026-11-22T10:00:00Z"});
    script
        .file("s3 cp", "i-1/stage.json", br#"{"time": 7, "stage": "completed"}"#)
        .answer("list-objects-v2", json!({"Contents": [object]}))
        .bytes(
            "machines/i-1/status.json",
            br#"{"time": 9, "text": "training", "status": {"phase": "training"}}"#,
        )
}
