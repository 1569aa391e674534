// The code highlighter's languages: their comments, strings and keywords.

/**
 * `comments` and `strings` are sources of regular expressions. An unclosed one extends to the end, as in a streamed text.
 * @typedef {{comments: string[], strings: string[], keywords: string, foldsCase?: boolean, word?: string}} Language
 */

const C_COMMENTS = [String.raw`\/\/[^\n]*`, String.raw`\/\*[^]*?(?:\*\/|$)`];
const HASH_COMMENTS = [String.raw`#[^\n]*`];
const DASH_COMMENTS = [String.raw`--[^\n]*`];
const DOUBLE = String.raw`"(?:[^"\\\n]|\\[^])*"?`;
const SINGLE = String.raw`'(?:[^'\\\n]|\\[^])*'?`;
const BACKTICK = "`(?:[^`\\\\]|\\\\[^])*`?";
const TRIPLE = [String.raw`"""[^]*?(?:"""|$)`, String.raw`'''[^]*?(?:'''|$)`];
const CHARACTER = String.raw`'(?:[^'\\\n]|\\[^\n]{1,10}?)'`; // in Rust a lone quote begins a lifetime
const C_WORDS =
  "break case char const continue default do double else enum extern false float for goto if int long return short signed sizeof static struct switch true typedef union unsigned void volatile while";
const JAVA_WORDS =
  "abstract boolean break byte case catch char class const continue default do double else enum extends final finally float for if implements import instanceof int interface long native new null package private protected public record return sealed short static super switch synchronized this throw throws true false try var void volatile while yield";

/** @type {Record<string, Language>} */
const LANGUAGES = {
  python: {
    comments: HASH_COMMENTS,
    strings: [...TRIPLE, DOUBLE, SINGLE],
    keywords: "False None True and as assert async await break case class continue def del elif else except finally for from global if import in is lambda match nonlocal not or pass raise return self try while with yield",
  },
  javascript: {
    comments: C_COMMENTS,
    strings: [BACKTICK, DOUBLE, SINGLE],
    keywords:
      "abstract any as async await boolean break case catch class const continue debugger declare default delete do else enum export extends false finally for from function get if implements import in instanceof interface let namespace new null number of private protected public readonly return satisfies set static string super switch this throw true try type typeof undefined unknown var void while yield",
  },
  c: {
    comments: C_COMMENTS,
    strings: [DOUBLE, SINGLE],
    keywords: `${C_WORDS} #include #define #ifdef #ifndef #if #else #elif #endif #pragma auto bool catch class concept constexpr consteval co_await co_return co_yield decltype delete explicit final friend inline mutable namespace new noexcept nullptr operator override private protected public requires static_cast template this throw try typename using virtual`,
    word: "#?[A-Za-z_]\\w*",
  },
  java: { comments: C_COMMENTS, strings: [TRIPLE[0], DOUBLE, SINGLE], keywords: JAVA_WORDS },
  csharp: {
    comments: C_COMMENTS,
    strings: [TRIPLE[0], DOUBLE, SINGLE],
    keywords: `${JAVA_WORDS} as async await base bool checked decimal delegate dynamic event explicit extern foreach get in init internal is lock namespace object operator out override params readonly ref sbyte set sizeof string struct uint ulong using value virtual where`,
  },
  kotlin: {
    comments: C_COMMENTS,
    strings: [TRIPLE[0], DOUBLE, SINGLE],
    keywords: `${JAVA_WORDS} as by companion constructor data fun in init inline internal is it lateinit object open operator out override suspend typealias val when where`,
  },
  swift: {
    comments: C_COMMENTS,
    strings: [TRIPLE[0], DOUBLE],
    keywords: "actor as async await break case catch class continue default defer deinit do else enum extension false fileprivate for func guard if import in init inout internal is lazy let mutating nil open private protocol public repeat rethrows return self some static struct subscript super switch throw throws true try typealias var weak where while",
  },
  go: {
    comments: C_COMMENTS,
    strings: ["`[^`]*`?", DOUBLE, SINGLE],
    keywords: "any bool break byte case chan const continue default defer else error fallthrough false float32 float64 for func go goto if import int int32 int64 interface iota map nil package range return rune select string struct switch true type uint var",
  },
  rust: {
    comments: C_COMMENTS,
    strings: [DOUBLE, CHARACTER],
    keywords: "as async await bool break char const continue crate dyn else enum extern f32 f64 false fn for i32 i64 if impl in let loop match mod move mut pub ref return self Self static str struct super trait true type u8 u32 u64 unsafe use usize where while",
  },
  ruby: {
    comments: HASH_COMMENTS,
    strings: [DOUBLE, SINGLE],
    keywords: "alias and begin break case class def do else elsif end ensure false for if in module next nil not or private puts raise redo require rescue retry return self super then true undef unless until when while yield",
  },
  php: {
    comments: [...C_COMMENTS, ...HASH_COMMENTS],
    strings: [DOUBLE, SINGLE],
    keywords: `${JAVA_WORDS} array as echo elseif empty foreach fn function global include isset match namespace require trait unset use`,
  },
  bash: {
    comments: [String.raw`(?<![^\s;(])#[^\n]*`],
    strings: [String.raw`"(?:[^"\\]|\\[^])*"?`, "'[^']*'?"],
    keywords: "alias case cd do done echo elif else esac exit export fi for function if in local read return set shift source sudo then trap until unset while",
  },
  sql: {
    comments: [...DASH_COMMENTS, C_COMMENTS[1]],
    strings: ["'(?:[^']|'')*'?", DOUBLE],
    foldsCase: true,
    keywords: "add all alter and as asc begin between by case cast check column commit constraint count create cross default delete desc distinct drop else end exists foreign from full group having if in index inner insert int integer into is join key left like limit not null offset on or order outer over partition primary references returning right rollback select set sum table text then union unique update using values varchar view when where with",
  },
  lua: {
    comments: [String.raw`--\[\[[^]*?(?:\]\]|$)`, ...DASH_COMMENTS],
    strings: [DOUBLE, SINGLE],
    keywords: "and break do else elseif end false for function goto if in local nil not or repeat return then true until while",
  },
  r: { comments: HASH_COMMENTS, strings: [DOUBLE, SINGLE], keywords: "FALSE NA NULL TRUE break else for function if in library next repeat return while" },
  haskell: {
    comments: [...DASH_COMMENTS, String.raw`\{-[^]*?(?:-\}|$)`],
    strings: [DOUBLE],
    keywords: "case class data deriving do else if import in infix instance let module newtype of then type where",
  },
  json: { comments: C_COMMENTS, strings: [DOUBLE], keywords: "true false null" },
  yaml: { comments: [String.raw`(?<!\S)#[^\n]*`], strings: [DOUBLE, "'[^'\\n]*'?"], keywords: "true false null yes no on off" },
  toml: { comments: [String.raw`[#;][^\n]*`], strings: [...TRIPLE, DOUBLE, SINGLE], keywords: "true false" },
  css: {
    comments: [C_COMMENTS[1]],
    strings: [DOUBLE, SINGLE],
    keywords: "@media @import @keyframes @font-face @supports @layer !important",
    word: "[@!]?[A-Za-z_-][\\w-]*",
  },
  html: {
    comments: ["<!--[^]*?(?:-->|$)"],
    strings: [String.raw`(?<==)"[^"]*"?`, String.raw`(?<==)'[^']*'?`],
    keywords: "",
    word: String.raw`<\/?[A-Za-z][\w:-]*|\/?>`,
  },
  docker: {
    comments: HASH_COMMENTS,
    strings: [DOUBLE, SINGLE],
    keywords: "FROM RUN CMD LABEL EXPOSE ENV ADD COPY ENTRYPOINT VOLUME USER WORKDIR ARG ONBUILD STOPSIGNAL HEALTHCHECK SHELL AS",
  },
};

/** Other names of these languages. */
const LANGUAGE_NAMES = {
  py: "python", python3: "python", js: "javascript", jsx: "javascript", ts: "javascript", tsx: "javascript", typescript: "javascript", mjs: "javascript",
  h: "c", cc: "c", cpp: "c", "c++": "c", hpp: "c", cuda: "c", objc: "c", scala: "kotlin", kt: "kotlin", groovy: "java", dart: "java", cs: "csharp", "c#": "csharp",
  golang: "go", rs: "rust", rb: "ruby", sh: "bash", shell: "bash", zsh: "bash", console: "bash", make: "bash", makefile: "bash", postgresql: "sql", mysql: "sql", sqlite: "sql",
  hs: "haskell", jsonc: "json", json5: "json", yml: "yaml", ini: "toml", conf: "toml", scss: "css", less: "css", xml: "html", svg: "html", vue: "html", dockerfile: "docker",
};
