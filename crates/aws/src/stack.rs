//! The CloudFormation stack of a job.

use std::{collections::BTreeMap, fmt, str::FromStr, thread, time::Duration};

use baton_console::{
    failure::{bad_input, failed},
    output,
};
use baton_job::exit::Failure;
use serde_json::{Value, json};

use crate::{api::Api, market::list};

/// All that is made on AWS.
pub(super) const TEMPLATE: &str = include_str!("../../../deploy/aws/baton.yaml");
/// Begins the name of every stack of ours.
const PREFIX: &str = "baton-";
/// Between two looks at a stack.
const INTERVAL: Duration = Duration::from_secs(4);

/// Name of a job: of its stack, its group, its folder in the bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Job(String);

impl Job {
    pub(super) fn name(&self) -> &str {
        &self.0
    }

    /// Name of its stack, and of its Auto Scaling group.
    pub(super) fn stack(&self) -> String {
        format!("{PREFIX}{}", self.0)
    }

    /// From a recipe's name, which may have any characters.
    pub(super) fn of_recipe(name: &str) -> Result<Self, String> {
        let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
        let text: String = name.chars().map(plain).take(32).collect();
        text.parse()
    }
}

impl FromStr for Job {
    type Err = String;

    /// As the template's `AllowedPattern` has it.
    fn from_str(text: &str) -> Result<Self, String> {
        let is_good = text.starts_with(|c: char| c.is_ascii_lowercase())
            && text.len() <= 32
            && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-');
        match is_good {
            true => Ok(Self(text.to_owned())),
            false => Err(format!(
                "{text:?} is no name of a job: small letters, digits and -, 32 at most, a letter first (--name)"
            )),
        }
    }
}

impl fmt::Display for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A stack as AWS tells of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stack {
    pub(super) status: String,
    pub(super) parameters: BTreeMap<String, String>,
    pub(super) outputs: BTreeMap<String, String>,
}

impl Stack {
    fn parse(value: &Value) -> Self {
        let pairs = |list_key: &str, key: &str, value_key: &str| {
            let pair = |entry: &Value| {
                Some((entry[key].as_str()?.to_owned(), entry[value_key].as_str()?.to_owned()))
            };
            list(value, list_key).filter_map(pair).collect()
        };
        Self {
            status: value["StackStatus"].as_str().unwrap_or_default().to_owned(),
            parameters: pairs("Parameters", "ParameterKey", "ParameterValue"),
            outputs: pairs("Outputs", "OutputKey", "OutputValue"),
        }
    }

    pub(super) fn parameter(&self, name: &str) -> &str {
        self.parameters.get(name).map_or("", String::as_str)
    }

    /// Of whose bucket the job's files are.
    pub(super) fn place(&self) -> String {
        format!("s3://{}/{}", self.parameter("Bucket"), self.parameter("Job"))
    }

    pub(super) fn has_several_nodes(&self) -> bool {
        self.parameter("Nodes") != "1"
    }

    /// What is left of a stack whose making failed: it has to go before another one has its name.
    fn is_wreck(&self) -> bool {
        [
            "ROLLBACK_COMPLETE",
            "ROLLBACK_FAILED",
            "CREATE_FAILED",
            "DELETE_FAILED",
            // Of a change set that nobody carries out, as `aws cloudformation deploy` leaves it when it fails.
            "REVIEW_IN_PROGRESS",
        ]
        .contains(&self.status.as_str())
    }

    fn is_changing(&self) -> bool {
        self.status.ends_with("_IN_PROGRESS") && !self.is_wreck()
    }
}

/// The jobs that have a stack in this region.
pub(super) fn jobs(api: &impl Api) -> Result<Vec<Job>, Failure> {
    let answer = api.json(&["cloudformation", "describe-stacks"])?;
    let is_ours = |stack: &&Value| list(stack, "Tags").any(|tag| tag["Key"] == "baton:job");
    let name = |stack: &Value| stack["StackName"].as_str()?.strip_prefix(PREFIX)?.parse().ok();
    Ok(list(&answer, "Stacks").filter(is_ours).filter_map(name).collect())
}

/// The stack of a job, if there is one.
pub(super) fn find(api: &impl Api, job: &Job) -> Result<Option<Stack>, Failure> {
    let answer = api.find(&["cloudformation", "describe-stacks", "--stack-name", &job.stack()])?;
    let stack = answer.as_ref().and_then(|answer| list(answer, "Stacks").next()).map(Stack::parse);
    Ok(stack.filter(|stack| stack.status != "DELETE_COMPLETE"))
}

/// The stack of a job that was launched.
pub(super) fn get(api: &impl Api, job: &Job) -> Result<Stack, Failure> {
    find(api, job)?.ok_or_else(|| {
        bad_input(format!(
            "there is no job {job} in this region: `baton aws up RECIPE --name {job}` launches one"
        ))
    })
}

/// Makes the stack, or brings the one that is there up to date; waits for it, and tells what happens.
pub(super) fn deploy(
    api: &impl Api,
    job: &Job,
    parameters: &BTreeMap<&str, String>,
) -> Result<Stack, Failure> {
    let mut there = find(api, job)?;
    if there.as_ref().is_some_and(Stack::is_changing) {
        there = Some(
            settled(api, job, &mut Events::from_now(api, job)?)?
                .ok_or_else(|| failed("the stack has gone meanwhile: try again"))?,
        );
    }
    if there.as_ref().is_some_and(|stack| stack.status == "UPDATE_ROLLBACK_FAILED") {
        return Err(bad_input(format!(
            "a change of the stack {0} failed and could not be undone: `aws cloudformation continue-update-rollback --stack-name {0}` \
             tries again, `baton aws down --name {job}` removes it",
            job.stack()
        )));
    }
    if there.as_ref().is_some_and(Stack::is_wreck) {
        output::note(format_args!("removing what is left of an earlier try ({})", job.stack()));
        delete(api, job)?;
        there = None;
    }
    let listed: Vec<Value> = parameters
        .iter()
        .map(|(key, value)| json!({"ParameterKey": key, "ParameterValue": value}))
        .collect();
    let listed = Value::from(listed).to_string();
    let tags = json!([{"Key": "baton:job", "Value": job.name()}]).to_string();
    let verb = if there.is_some() { "update-stack" } else { "create-stack" };
    let mut events = Events::from_now(api, job)?;
    let name = job.stack();
    let arguments = [
        "cloudformation",
        verb,
        "--stack-name",
        &name,
        "--template-body",
        TEMPLATE,
        "--parameters",
        &listed,
        "--tags",
        &tags,
        "--capabilities",
        "CAPABILITY_IAM",
    ];
    match api.json(&arguments) {
        Ok(_) => {}
        // Nothing differs, as when a job that was drained goes on.
        Err(error) if error.message().contains("No updates are to be performed") => {}
        Err(error) => return Err(error.into()),
    }
    let stack = settled(api, job, &mut events)?;
    match stack {
        Some(stack) if ["CREATE_COMPLETE", "UPDATE_COMPLETE"].contains(&stack.status.as_str()) => {
            Ok(stack)
        }
        stack => {
            let status = stack.map_or_else(|| "gone".to_owned(), |stack| stack.status);
            let why = events.first_failure.unwrap_or_else(|| format!("its status is {status}"));
            Err(failed(format!(
                "the stack {name} cannot be made: {why}; `baton aws down --name {job}` removes what is left"
            )))
        }
    }
}

/// Deletes the stack and waits for its end.
pub(super) fn delete(api: &impl Api, job: &Job) -> Result<(), Failure> {
    let mut events = Events::from_now(api, job)?;
    api.json(&["cloudformation", "delete-stack", "--stack-name", &job.stack()])?;
    match settled(api, job, &mut events)? {
        None => Ok(()),
        Some(stack) => {
            let why = events.first_failure.unwrap_or(stack.status);
            Err(failed(format!(
                "the stack {} cannot be deleted: {why}; mend that, then run `baton aws down` again",
                job.stack()
            )))
        }
    }
}

/// Waits until nothing changes any more; none if the stack has gone.
fn settled(api: &impl Api, job: &Job, events: &mut Events) -> Result<Option<Stack>, Failure> {
    loop {
        let stack = find(api, job)?;
        events.tell(api, job)?;
        match stack {
            Some(stack) if stack.is_changing() => thread::sleep(INTERVAL),
            stack => return Ok(stack),
        }
    }
}

/// What happens to a stack, as it happens.
struct Events {
    told: Vec<String>,
    /// Later ones are its consequences.
    first_failure: Option<String>,
}

impl Events {
    /// Leaves out what has happened so far.
    fn from_now(api: &impl Api, job: &Job) -> Result<Self, Failure> {
        let mut events = Self { told: Vec::new(), first_failure: None };
        events.told = events.fresh(api, job)?.into_iter().map(|(id, _)| id).collect();
        Ok(events)
    }

    fn tell(&mut self, api: &impl Api, job: &Job) -> Result<(), Failure> {
        for (id, event) in self.fresh(api, job)? {
            self.told.push(id);
            let text = |key: &str| event[key].as_str().unwrap_or_default();
            let (resource, status, reason) =
                (text("LogicalResourceId"), text("ResourceStatus"), text("ResourceStatusReason"));
            if resource == job.stack() {
                continue;
            }
            if status.ends_with("_FAILED") {
                let why = format!("{resource}: {reason}");
                output::note(format_args!("  {why}"));
                self.first_failure.get_or_insert(why);
            } else if let Some(done) = status.strip_suffix("_COMPLETE") {
                let verb = match done {
                    "CREATE" => "made",
                    "UPDATE" => "changed",
                    "DELETE" => "deleted",
                    _ => done,
                };
                output::note(format_args!("  {resource} is {verb}"));
            }
        }
        Ok(())
    }

    /// Those not told yet, oldest first.
    fn fresh(&self, api: &impl Api, job: &Job) -> Result<Vec<(String, Value)>, Failure> {
        let answer =
            api.find(&["cloudformation", "describe-stack-events", "--stack-name", &job.stack()])?;
        let answer = answer.unwrap_or_default();
        let mut fresh: Vec<_> = list(&answer, "StackEvents")
            .filter_map(|event| Some((event["EventId"].as_str()?.to_owned(), event.clone())))
            .filter(|(id, _)| !self.told.contains(id))
            .collect();
        fresh.reverse();
        Ok(fresh)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Script, stack};

    fn job() -> Job {
        "digits".parse().unwrap()
    }

    #[test]
    fn a_recipes_name_becomes_one_that_aws_takes() {
        assert_eq!(Job::of_recipe("ResNet50_p4d 60ep").unwrap().name(), "resnet50-p4d-60ep");
        for bad in ["", "9lives", "Capital", "under_score", &"x".repeat(33)] {
            assert!(bad.parse::<Job>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_stack_that_cannot_be_made_is_told_by_its_first_failure() {
        let event = |id: &str, resource: &str, status: &str, reason: &str| json!({"EventId": id, "LogicalResourceId": resource, "ResourceStatus": status, "ResourceStatusReason": reason});
        let api = Script::new()
            .error(
                "describe-stacks",
                "ValidationError",
                "Stack with id baton-digits does not exist",
            )
            .error(
                "describe-stack-events",
                "ValidationError",
                "Stack [baton-digits] does not exist",
            )
            .answer("create-stack", json!({"StackId": "id"}))
            .answer("describe-stacks", json!({"Stacks": [stack("ROLLBACK_COMPLETE", &[])]}))
            .answer(
                "describe-stack-events",
                json!({"StackEvents": [
                event("3", "SecurityGroup", "DELETE_COMPLETE", ""),
                event("2", "Group", "CREATE_FAILED", "Resource creation cancelled"),
                event("1", "Role", "CREATE_FAILED", "not authorized to perform: iam:CreateRole")]}),
            );
        let error = deploy(&api, &job(), &BTreeMap::new()).unwrap_err();
        assert!(
            error.message.contains("Role: not authorized to perform: iam:CreateRole"),
            "{error}"
        );
        assert!(error.message.contains("baton aws down --name digits"), "{error}");
    }

    #[test]
    fn a_stack_that_is_as_it_should_be_is_left_alone() {
        let there = || json!({"Stacks": [stack("CREATE_COMPLETE", &[("Bucket", "b"), ("Job", "digits"), ("Nodes", "1")])]});
        let api = Script::new()
            .answer("describe-stacks", there())
            .answer("describe-stack-events", json!({"StackEvents": []}))
            .error("update-stack", "ValidationError", "No updates are to be performed.")
            .answer("describe-stacks", there())
            .answer("describe-stack-events", json!({"StackEvents": []}));
        let stack = deploy(&api, &job(), &BTreeMap::new()).unwrap();
        assert_eq!((stack.place().as_str(), stack.has_several_nodes()), ("s3://b/digits", false));
    }

    #[test]
    fn the_wreck_of_an_earlier_try_is_removed_first() {
        let api = Script::new()
            .answer("describe-stacks", json!({"Stacks": [stack("ROLLBACK_COMPLETE", &[])]}))
            .answer("describe-stack-events", json!({"StackEvents": []}))
            .answer("delete-stack", Value::Null)
            .error(
                "describe-stacks",
                "ValidationError",
                "Stack with id baton-digits does not exist",
            )
            .answer("describe-stack-events", json!({"StackEvents": []}))
            .answer("describe-stack-events", json!({"StackEvents": []}))
            .answer("create-stack", json!({"StackId": "id"}))
            .answer("describe-stacks", json!({"Stacks": [stack("CREATE_COMPLETE", &[])]}))
            .answer("describe-stack-events", json!({"StackEvents": []}));
        assert_eq!(deploy(&api, &job(), &BTreeMap::new()).unwrap().status, "CREATE_COMPLETE");
    }
}
