//! What answers look like, in one piece and as streams of events.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use fracbit_engine::{Done, Finish};
use fracbit_io::Tokenizer;
use serde_json::{Map, Value, json};

use crate::engine::Event;
use crate::fields::Refusal;
use crate::form::{Answering, Events, Form};
use crate::request::{Prompt, Request};
use crate::scores::Score;
use crate::tools::{Calls, Said, Spoken, call_id, calls_of, rest_of, said_of};

/// The answers to one request, in the form of `/v1/chat/completions` and `/v1/completions`.
#[derive(Clone, Debug)]
pub(crate) struct Answers {
    chat: bool,
    usage: bool,
    echo: bool,
    /// Texts for each prompt that are told, and that are written.
    n: usize,
    best_of: usize,
    /// Likeliest tokens beside each, where probabilities are asked for.
    logprobs: Option<usize>,
    number: u64,
    id: String,
    created: u64,
    model: String,
    tokenizer: Arc<Tokenizer>,
    /// The calls of each text, where there may be some.
    calls: Vec<Option<Calls>>,
    /// Texts still to be done, and the tokens of those that are.
    left: usize,
    total: Usage,
}

/// Tokens of a request's texts.
#[derive(Clone, Copy, Debug, Default)]
struct Usage {
    prompt: usize,
    cached: usize,
    tokens: usize,
    guessed: usize,
    tried: usize,
}

/// One text as far as it is there.
#[derive(Clone, Debug, Default)]
struct Choice {
    spoken: Spoken,
    scores: Vec<Score>,
    /// The mean logarithm of the probabilities of its tokens.
    mean: f64,
    finish: Option<&'static str>,
}

impl Form for Answers {
    fn new(request: &Request, Answering { texts, id, model, tokenizer, format, .. }: Answering) -> Self {
        let chat = matches!(request.prompts[..], [Prompt::Chat { .. }]);
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        let number = id;
        let id = format!("{}-{id:016x}", if chat { "chatcmpl" } else { "cmpl" });
        let calls = vec![calls_of(request, format); texts];
        let Request { usage, echo, n, best_of, logprobs, .. } = *request;
        let (left, total) = (texts, Usage::default());
        Self {
            chat,
            usage,
            echo,
            n,
            best_of,
            logprobs,
            number,
            id,
            created,
            model,
            tokenizer,
            calls,
            left,
            total,
        }
    }

    async fn whole(mut self, events: &mut Events) -> Result<Value, Refusal> {
        let mut choices = vec![Choice::default(); self.left];
        while self.left > 0 {
            match events.recv().await {
                Some((at, Event::Piece(text, scores))) => {
                    let said = said_of(&mut self.calls[at], text);
                    choices[at].spoken.add(said);
                    choices[at].scores.extend(scores);
                }
                Some((at, Event::Done(done, _))) => {
                    let said = rest_of(&mut self.calls[at]);
                    choices[at].spoken.add(said);
                    choices[at].mean = mean(&choices[at].scores[if self.echo { done.prompt } else { 0 }..]);
                    choices[at].finish = Some(self.reason(at, done.finish));
                    self.count(at, done);
                }
                Some((_, Event::Failed(message))) => return Err(Refusal::new(500, message)),
                Some((_, Event::GivenUp)) | None => return Err(Refusal::ending()),
            }
        }
        for tried in choices.chunks_mut(self.best_of) {
            if self.best_of > self.n {
                // Of equal ones the first.
                tried.sort_by(|a, b| b.mean.total_cmp(&a.mean));
            }
        }
        let told = choices.chunks(self.best_of).flat_map(|tried| &tried[..self.n]).cloned();
        let choices: Value = (0..).zip(told).map(|(at, choice)| self.choice(at, choice)).collect();
        let mut answer = self.object(if self.chat { "chat.completion" } else { "text_completion" }, choices);
        answer["usage"] = self.counted();
        Ok(answer)
    }

    fn first(&mut self) -> String {
        let role = json!({ "role": "assistant", "content": "" });
        let all = (0..self.left).filter(|_| self.chat);
        all.map(|at| self.piece(at, role.clone(), "", Vec::new(), None)).collect()
    }

    fn event(&mut self, at: usize, event: Event) -> Option<String> {
        if self.left == 0 {
            return None;
        }
        let refusal = match event {
            Event::Piece(text, scores) => {
                if self.calls[at].is_none() {
                    return Some(self.piece(at, json!({ "content": text }), &text, scores, None));
                }
                let mut scores = Some(scores).filter(|scores| !scores.is_empty());
                let before = self.called(at);
                let said = said_of(&mut self.calls[at], text);
                let pieces = self.said(at, before, said, &mut scores);
                // Nothing is known of the text yet, and of its probabilities all.
                let rest = scores.map(|scores| self.piece(at, json!({}), "", scores, None));
                return Some(pieces + &rest.unwrap_or_default());
            }
            Event::Done(done, _) => {
                self.count(at, done);
                let before = self.called(at);
                let said = rest_of(&mut self.calls[at]);
                let pieces = self.said(at, before, said, &mut None);
                let reason = self.reason(at, done.finish);
                let last = pieces + &self.piece(at, json!({}), "", Vec::new(), Some(reason));
                return Some(last + &if self.left == 0 { self.last() } else { String::new() });
            }
            Event::Failed(message) => Refusal::new(500, message),
            Event::GivenUp => Refusal::ending(),
        };
        self.left = 0;
        Some(line(&refusal.json()) + DONE)
    }
}

impl Answers {
    /// Calls of a text so far.
    fn called(&self, at: usize) -> usize {
        self.calls[at].as_ref().map_or(0, Calls::count)
    }

    fn reason(&self, at: usize, finish: Finish) -> &'static str {
        match finish.is_cut() {
            false if self.called(at) > 0 => "tool_calls",
            false => "stop",
            true => "length",
        }
    }

    /// What a stream says of it; `calls` were there before. Scores go with the first piece.
    fn said(&self, at: usize, calls: usize, said: Vec<Said>, scores: &mut Option<Vec<Score>>) -> String {
        let mut next = calls;
        let mut events = String::new();
        for said in said {
            let delta = match said {
                Said::Text(text) => json!({ "content": text }),
                Said::Call(name) => {
                    next += 1;
                    let mut call = self.call(at, next - 1, &name, "");
                    call["index"] = (next - 1).into();
                    json!({ "tool_calls": [call] })
                }
                Said::Arguments(piece) => {
                    let index = next.saturating_sub(1);
                    json!({ "tool_calls": [{ "index": index, "function": { "arguments": piece } }] })
                }
                Said::Broken { rest, .. } if rest.is_empty() => continue,
                Said::Broken { rest, .. } => json!({ "content": rest }),
            };
            events += &self.piece(at, delta, "", scores.take().unwrap_or_default(), None);
        }
        events
    }

    fn call(&self, at: usize, index: usize, name: &str, arguments: &str) -> Value {
        let id = call_id(self.number, at, index);
        json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } })
    }

    /// What follows the last text of a stream.
    fn last(&self) -> String {
        if !self.usage {
            return DONE.to_owned();
        }
        let mut chunk = self.object(self.chunk(), json!([]));
        chunk["usage"] = self.counted();
        line(&chunk) + DONE
    }

    fn object(&self, kind: &str, choices: Value) -> Value {
        let Self { id, created, model, .. } = self;
        json!({ "id": id, "object": kind, "created": created, "model": model, "choices": choices })
    }

    fn chunk(&self) -> &'static str {
        if self.chat { "chat.completion.chunk" } else { "text_completion" }
    }

    fn choice(&self, at: usize, Choice { spoken, scores, finish, .. }: Choice) -> Value {
        let (text, calls) = spoken.apart();
        let mut choice = json!({ "index": at });
        if self.chat {
            choice["message"] = json!({ "role": "assistant", "content": text });
            if !calls.is_empty() {
                let all = calls.iter().enumerate();
                let all: Value = all.map(|(i, (name, with))| self.call(at, i, name, with)).collect();
                choice["message"]["tool_calls"] = all;
                if text.is_empty() {
                    choice["message"]["content"] = Value::Null;
                }
            }
        } else {
            choice["text"] = text.into();
        }
        choice["logprobs"] = self.scores(&scores);
        choice["finish_reason"] = finish.into();
        choice
    }

    fn piece(
        &self,
        at: usize,
        delta: Value,
        text: &str,
        scores: Vec<Score>,
        finish: Option<&'static str>,
    ) -> String {
        let mut choice = json!({ "index": at });
        if self.chat {
            choice["delta"] = delta;
        } else {
            choice["text"] = text.into();
        }
        choice["logprobs"] = if scores.is_empty() { Value::Null } else { self.scores(&scores) };
        choice["finish_reason"] = finish.into();
        let mut chunk = self.object(self.chunk(), json!([choice]));
        if self.usage {
            chunk["usage"] = Value::Null;
        }
        line(&chunk)
    }

    /// A text is done. Tokens of a prompt count once, however many texts follow it.
    fn count(&mut self, at: usize, done: Done) {
        self.left -= 1;
        if at.is_multiple_of(self.best_of) {
            self.total.prompt += done.prompt;
            self.total.cached += done.cached;
        }
        self.total.tokens += done.tokens;
        self.total.guessed += done.guessed;
        self.total.tried += done.tried;
    }

    fn counted(&self) -> Value {
        let Usage { prompt, cached, tokens, guessed, tried } = self.total;
        json!({
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "total_tokens": prompt + tokens,
            "prompt_tokens_details": { "cached_tokens": cached },
            "completion_tokens_details": {
                "accepted_prediction_tokens": guessed, "rejected_prediction_tokens": tried - guessed,
            },
        })
    }

    /// The bytes of a token, and its text. What is no text by itself is spelled in hexadecimal
    /// digits, as OpenAI does.
    fn spelled(&self, token: u32) -> (Vec<u8>, String) {
        let bytes = self.tokenizer.token_bytes(token).unwrap_or_default();
        let text = String::from_utf8(bytes.clone())
            .unwrap_or_else(|_| bytes.iter().fold("bytes:".to_owned(), |all, b| format!("{all}\\x{b:02x}")));
        (bytes, text)
    }

    /// Scores in the form of the request's kind.
    fn scores(&self, scores: &[Score]) -> Value {
        let Some(top) = self.logprobs else { return Value::Null };
        if self.chat {
            let one = |token: u32, logprob: Option<f64>| {
                let (bytes, text) = self.spelled(token);
                json!({ "token": text, "logprob": logprob, "bytes": bytes })
            };
            let all: Value = scores
                .iter()
                .map(|score| {
                    let mut entry = one(score.token, score.logprob);
                    entry["top_logprobs"] = score.top.iter().map(|&(t, p)| one(t, Some(p))).collect();
                    entry
                })
                .collect();
            return json!({ "content": all, "refusal": null });
        }
        let mut columns = [const { Vec::new() }; 4];
        for score in scores {
            let (_, text) = self.spelled(score.token);
            let others = score.logprob.filter(|_| top > 0).map(|logprob| {
                // Texts are names here: of several tokens with one text the likeliest counts.
                let mut others = Map::new();
                for (token, logprob) in score.top.iter().copied().chain([(score.token, logprob)]) {
                    others.entry(self.spelled(token).1).or_insert(logprob.into());
                }
                others
            });
            let row = [text.into(), score.logprob.into(), others.into(), score.offset.into()];
            columns.iter_mut().zip(row).for_each(|(column, value): (&mut Vec<Value>, _)| column.push(value));
        }
        let [tokens, logprobs, others, offsets] = columns;
        json!({
            "tokens": tokens, "token_logprobs": logprobs, "top_logprobs": others, "text_offset": offsets,
        })
    }
}

/// The mean logarithm of the probabilities of tokens: that of none is the least.
fn mean(scores: &[Score]) -> f64 {
    let sum: f64 = scores.iter().filter_map(|score| score.logprob).sum();
    if scores.is_empty() { f64::NEG_INFINITY } else { sum / scores.len() as f64 }
}

const DONE: &str = "data: [DONE]\n\n";

/// An event of a stream.
fn line(value: &Value) -> String {
    format!("data: {value}\n\n")
}
