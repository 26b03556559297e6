//! `fracbit serve`.

use crate::{
    args::{self, CacheArgs, NestedArgs},
    context::Context,
    failure::{Exit, Failure},
    files,
    generate::{Nested, WithLoader, Words, context_of, with_loader},
    gpu::DeviceName,
    memory,
    sampling::PickArgs,
};
use clap::{Args, builder::NonEmptyStringValueParser};
use fracbit::{Opened, Progress};
use fracbit_base::Bytes;
use fracbit_engine::full_pages;
use fracbit_io::{Pooling, Tokenizer};
use fracbit_model::{KvPool, Runtime};
use fracbit_server::{Loaded, Options, Origin, Server, Tls, interrupt, reloads};
use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    panic::resume_unwind,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

/// Requests that may wait for a place.
const QUEUE: usize = 64;

/// How long texts may still take when the server should end.
const GRACE: Duration = Duration::from_secs(10);

const AFTER: &str = "\
A browser finds a page to chat in at the address itself, http://127.0.0.1:8080/. Addresses for programs, as in OpenAI's API, also streaming: /v1/chat/completions, /v1/completions, /v1/responses, /v1/embeddings, /v1/models; as in Anthropic's: /v1/messages, \
/v1/messages/count_tokens. Beside them /tokenize, /detokenize, \
/tokenizer_info, /props, /slots, /version, /health, and /metrics for Prometheus. Beside OpenAI's fields requests may have top_k, min_p, repetition_penalty (or repeat_penalty), typical_p, \
xtc_*, mirostat*, dry_*, min_tokens, ignore_eos, stop_token_ids, skip_special_tokens and chat_template_kwargs. Texts follow a JSON schema (response_format, guided_json), a regular \
expression (guided_regex), a list (guided_choice) or a grammar (guided_grammar, in the notation of Lark or GBNF; grammar, in GBNF); structured_outputs has them all. Chats may call functions \
(tools, tool_choice, parallel_tool_calls), in the form of the model's template, which /props names. A field that the server does not know or cannot serve is refused by name. \
Probabilities (logprobs) are the model's own, before penalties, temperature and filters.

The options under Sampling, and where they are left out what generation_config.json of the model says at the start, hold where a request says nothing; without a seed every request has another.

The line with the address is printed when requests are served. Ctrl-C or SIGTERM end the server: requests that wait are refused, texts that are being written have 10 s to end. \
SIGHUP loads the model directory anew, in the background: requests that come once it is there go to the new model, those before are done on the old one, which is then freed; \
until then both are in memory. What cannot be loaded is told in the log, and the model before goes on. Put a new directory in the place of the old one by renaming, not by writing into its files.

Examples:
  fracbit serve small
  curl http://127.0.0.1:8080/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Why is the sky blue?\"}]}'
  fracbit serve small --host 0.0.0.0 --api-keys keys.txt --slots 8
  fracbit serve small --alias gpt-4o-mini      # for programs that ask for a name of their own
  lm_eval --model local-completions --tasks piqa --model_args \\
    model=small,base_url=http://127.0.0.1:8080/v1/completions";

/// Answer other programs, over HTTP.
///
/// Serves the model in the form of OpenAI's API, several requests at a time: their texts are
/// decoded together, which takes far less time than one after the other, and a conversation that
/// goes on finds its past kept. The same request with the same seed gets the same text of a
/// quantized model, whatever else is served.
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub(crate) struct ServeArgs {
    /// The model, quantized or not.
    model: PathBuf,
    /// Address to listen at. Only this machine reaches the default; others want a key.
    #[arg(long, value_name = "IP", default_value = "127.0.0.1")]
    host: IpAddr,
    /// Port to listen at; 0 takes a free one.
    #[arg(long, value_name = "N", default_value_t = 8080)]
    port: u16,
    /// File of keys, one on each line, of which requests must then present one (`Authorization:
    /// Bearer KEY` or `X-Api-Key: KEY`).
    #[arg(long, visible_alias = "key-file", value_name = "FILE")]
    api_keys: Option<PathBuf>,
    /// Name that a server without keys may be asked for by, beside its address and localhost, such
    /// as host.docker.internal for containers on this machine; may be given several times.
    #[arg(long, value_name = "NAME")]
    allow_host: Vec<String>,
    /// Origin, such as https://chat.example, whose pages may read answers in a browser (CORS); may
    /// be given several times.
    #[arg(long, value_name = "ORIGIN")]
    allow_origin: Vec<Origin>,
    /// Tell each answer in a line of JSON on standard error: time, method, path, status, and
    /// seconds until it began.
    #[arg(long)]
    log_requests: bool,
    /// Certificate in PEM form, with those that vouch for it behind it: connections are then
    /// encrypted (https).
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Private key of the certificate, in PEM form.
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Name of the model in requests [default: that of its directory].
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    name: Option<String>,
    /// Another name of the model in requests; may be given several times.
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    alias: Vec<String>,
    /// Texts at a time; further requests wait.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = args::count)]
    slots: usize,
    /// Connections at a time from one address; a proxy in front of the server may want more.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = args::count)]
    peer_connections: usize,
    /// Tokens of a text with its prompt, no more than the model's context. A `longrope` model (Phi)
    /// that gets more than its original context reads every text as a long one [default: 4096, or
    /// the model's context when that is shorter].
    #[arg(long, value_name = "N", value_parser = args::count)]
    ctx: Option<usize>,
    /// Let what messages spell become control tokens of the chat. Prompts of /v1/completions may
    /// always spell them.
    #[arg(long)]
    allow_special: bool,
    /// Most memory of the cache of keys and values, which all texts share, such as 2GB: at least
    /// one full text, whose size is printed at the start. When it is full, requests wait, or a text
    /// that is being written does [default: as much as all texts take at their full length].
    #[arg(long, value_name = "SIZE")]
    cache_memory: Option<Bytes>,
    /// Where the model runs.
    #[arg(long, value_enum, default_value_t)]
    device: DeviceName,
    #[command(flatten)]
    cache: CacheArgs,
    #[command(flatten)]
    nested: NestedArgs,
    // Last, since the heading of a group stays for what follows it.
    #[command(flatten)]
    picking: PickArgs,
}

pub(crate) fn run(args: &ServeArgs, context: &mut Context) -> Result<(), Failure> {
    let keys = args.api_keys.as_deref().map_or(Ok(Vec::new()), read_keys)?;
    if keys.is_empty() && !args.host.is_loopback() {
        let rule =
            format!("`--host {}` lets other machines in: it wants `--api-keys FILE` with it", args.host);
        return Err(Failure::new(Exit::Usage, anyhow::Error::msg(rule)));
    }
    let tls = args.tls_cert.as_deref().zip(args.tls_key.as_deref());
    let tls = tls.map(|(cert, key)| Tls::read(cert, key)).transpose();
    let tls = tls.map_err(|error| Failure::new(Exit::BadInput, error.into()))?;
    let nested = Nested::read(&args.nested)?;
    let opened = files::open(&args.model, context)?;
    context_of(args.ctx, opened.config.max_position_embeddings)?;
    // What the model's files say wrong should be said at once.
    args.picking.config(&opened, 0)?;
    let server = Server::bind(SocketAddr::new(args.host, args.port)).map_err(failure)?;
    let address = server.address().map_err(failure)?;
    let serving = Serving { args, opened, server, address, nested, keys, tls, context };
    with_loader(args.device, &args.nested, serving)
}

/// What is to be served.
struct Serving<'a> {
    args: &'a ServeArgs,
    opened: Opened,
    server: Server,
    address: SocketAddr,
    nested: Nested,
    keys: Vec<String>,
    tls: Option<Tls>,
    context: &'a mut Context,
}

/// The model of a directory with its tokenizer, as the arguments want it.
fn loaded<R: Runtime>(
    args: &ServeArgs,
    nested: &Nested,
    opened: &Opened,
    tokenizer: Tokenizer,
    model: R,
) -> Result<Loaded<R>, Failure> {
    nested.check(&model)?;
    let context = context_of(args.ctx, opened.config.max_position_embeddings)?;
    let kv = args.cache.kv();
    let (one, all) = (full_pages(context, 1), full_pages(context, args.slots));
    let pages = match args.cache_memory {
        None => all,
        Some(most) => KvPool::pages_within(model.config(), kv, most.0).min(all),
    };
    if pages < one {
        let least = (one as u64).saturating_mul(KvPool::page_bytes(model.config(), kv) as u64);
        let rule = format!(
            "`--cache-memory` should be at least {}, the cache of one text of {context} tokens, got {}",
            Bytes(least),
            args.cache_memory.unwrap_or(Bytes(0))
        );
        return Err(Failure::new(Exit::Usage, anyhow::Error::msg(rule))
            .hint("shorter texts (`--ctx`) and fewer bits (`--kv`) take less"));
    }
    let sampling = args.picking.config(opened, 0)?;
    let Words { tokenizer, end_tokens, .. } = Words::new(opened, tokenizer);
    let pooling = Pooling::read(opened.checkpoint.path(), opened.config.hidden_size);
    let pooling = pooling.map(Option::unwrap_or_default).map_err(|e| e.to_string());
    Ok(Loaded { model, tokenizer, context, pages: Some(pages), end_tokens, pooling, sampling })
}

impl WithLoader for Serving<'_> {
    fn call<R: Runtime + Send>(
        self,
        load: impl Fn(&Opened) -> Result<R, Failure> + Sync,
    ) -> Result<(), Failure> {
        let Self { args, opened, server, address, nested, keys, tls, context } = self;
        // The tokenizer is read meanwhile: both take half a second where the vocabulary is large.
        let (model, tokenizer) = thread::scope(|scope| {
            let model = scope.spawn(|| load(&opened));
            let tokenizer = files::tokenizer(&opened, context);
            (model.join().unwrap_or_else(|panic| resume_unwind(panic)), tokenizer)
        });
        let first = loaded(args, &nested, &opened, tokenizer?, model?)?;
        drop(opened);
        let id = args.name.clone().unwrap_or_else(|| name_of(&args.model));
        let page = KvPool::page_bytes(first.model.config(), args.cache.kv());
        let bytes = |pages: usize| Bytes(pages.saturating_mul(page) as u64);
        context.progress.note(&format!(
            "`{id}`: {} texts at a time, {} tokens each ({}); the cache takes at most {}",
            args.slots,
            first.context,
            bytes(full_pages(first.context, 1) - 1),
            bytes(first.pages.unwrap_or(0))
        ));
        if let Err(tight) = memory::enough(bytes(first.pages.unwrap_or(0)), "a full cache") {
            let less = "`--cache-memory`, `--slots`, `--ctx` and `--kv` make it smaller";
            context.progress.note(&format!("note: {}; {less}", tight.line()));
        }
        let scheme = if tls.is_some() { "https" } else { "http" };
        // All addresses of this machine are no address to go to.
        let mut page = address;
        if page.ip().is_unspecified() {
            page.set_ip(IpAddr::V4(Ipv4Addr::LOCALHOST));
        }
        context.progress.note(&format!("to chat in a browser: {scheme}://{page}/"));
        let options = Options {
            id,
            aliases: args.alias.clone(),
            slots: args.slots,
            queue: QUEUE,
            kv: args.cache.kv(),
            keys,
            hosts: args.allow_host.clone(),
            origins: args.allow_origin.clone(),
            log_requests: args.log_requests,
            tls,
            peer_connections: args.peer_connections,
            grace: GRACE,
            allow_special: args.allow_special,
            scheduler: nested.scheduler.clone(),
            draft: nested.draft,
        };
        // Before the address is said: who has read it may send the signal.
        let reloads = reloads().map_err(|e| Failure::new(Exit::Failed, e.into()))?;
        context.out.stream(&format!("serving at {scheme}://{address}/v1\n"))?;
        let again = || {
            let opened = Opened::new(&args.model)?;
            let tokenizer = opened.tokenizer()?;
            loaded(args, &nested, &opened, tokenizer, load(&opened)?)
        };
        let again = || again().map_err(|failure: Failure| failure.line());
        server.run(first, options, (again, reloads), interrupt()).map_err(failure)
    }
}

/// The keys in a file: its lines without spaces around them, but empty ones.
fn read_keys(path: &Path) -> Result<Vec<String>, Failure> {
    let text = files::read_text(path)?;
    let keys: Vec<String> =
        text.lines().map(str::trim).filter(|key| !key.is_empty()).map(str::to_owned).collect();
    let good = |line: &str| line.trim().bytes().all(|b| b.is_ascii_graphic());
    let bad = text.lines().position(|line| !good(line));
    // What a key is stays between those who know it.
    let found = match bad {
        Some(at) => format!("line {} is none", at + 1),
        None if keys.is_empty() => "it holds none".to_owned(),
        None => return Ok(keys),
    };
    let rule = "should hold keys of visible ASCII characters, one on each line";
    Err(Failure::input(format!("`{}` {rule}; {found}", path.display())))
}

/// The name of a directory, also of `.`.
fn name_of(model: &Path) -> String {
    let full = model.canonicalize().unwrap_or_else(|_| model.to_owned());
    full.file_name().map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
}

fn failure(error: fracbit_server::Error) -> Failure {
    let taken = matches!(&error, fracbit_server::Error::Listen { source, .. } if source.kind() == io::ErrorKind::AddrInUse);
    let failure = Failure::new(Exit::Failed, error.into());
    if taken { failure.hint("`--port N` takes another port, 0 a free one") } else { failure }
}
